"""Messages between the scheduler and a worker."""

from typing import TypeAlias

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.protocol.wire.link_messages import Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.side_rows import SideRows
from quire.protocol.wire.transfer_messages import BlocksMoved, DiskContents, DiskPages, HostPages, MoveBlocks


class Configure(Message, frozen=True, tag=30):
    """Configuration of a worker that joins a group.

    Attributes:
        last_step: number of the last step before this epoch; the next step follows it.
        num_blocks: size of an earlier group's block pool, the null block included; 0 lets the group decide.
        num_slots: the same of its pool of state slots, slot 0 included.
    """

    worker_epoch: int
    kv_layout: KVLayout
    config: EngineConfig
    last_step: int = 0
    num_blocks: int = 0
    num_slots: int = 0


class NewRequestData(msgspec.Struct, array_like=True, frozen=True):
    """Everything from which a worker builds a row.

    Its tokens and block ids are parts of the message's two packed arrays, in the order of the requests.

    Attributes:
        num_tokens: number of known tokens, prompt and output, in the token array.
        num_computed_tokens: number of positions with KV already in the given blocks.
        num_blocks: number of ids per group in the block array.
        adapter: number of its adapter (``LoadAdapter``); 0 for none. The adapter is in a slot in each step that
            computes the request, and may be in none while the request is parked.
        pooling: what its prompt is turned into; the row then samples nothing, and ends with its last token.
        items: images and given embeddings of its prompt that have positions to compute, in ascending order. Where the
            grids of images decide positions (``VisionConfig.mrope_section``), all of them. Their rows are there in each
            step that computes their positions.
    """

    handle: int
    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: list[int]
    sampling: SamplingParams
    seed: int
    adapter: int = 0
    pooling: PoolingParams | None = None
    items: list[InputItem] = []

    @property
    def samples(self) -> bool:
        return self.pooling is None


class SchedulerOutput(Message, frozen=True, tag=31):
    """One step, as a diff. An active request that it does not mention computes one token.

    Applied in the order: removed and parked, new, unparked, chosen, appended, row moves, block copies, copies and
    zeros of states, counts.

    Attributes:
        step: number of the step, which continues over epochs.
        removed, parked: handles that leave, and handles that stay without being scheduled.
        new_requests: rows to build; ``token_ids`` and ``block_ids`` are their packed arrays.
        unparked: parked handles that become active.
        appended_handles, appended_block_ids: newly allocated blocks of known requests, one entry each, in the order of
            the request's block table; ``appended_groups`` is None while all are of group 0.
        counts: (handle, tokens) of each request that computes a number of tokens other than one.
        block_copies: (source, target) of blocks whose content is copied before the step computes anything.
        forks: (handle, parent) of new requests without a token to compute: the parent computes their last token in this
            step, and both sample from its logits. A block that the parent is filling is copied by a later step.
        chosen: (handle, token) of requests whose last sampled token is replaced by this one: beams of a search.
        drafts: (handle, drafts) of each request that may verify drafts: up to this many of its tokens, the last ones.
            Only the worker knows the drafts and their actual number, since its proposer makes them as the step begins.
        state_slots: slot of the recurrent state of each new request, in the order of ``new_requests``; None for models
            without states. A request keeps its slot until it is removed.
        state_copies: (source, target) of slots that are copied before the step computes anything, in this order.
        blocks_to_zero: slots of new requests that begin without a state, zeroed before the step computes anything.
        awaits_sample_inputs: a request that samples in this step has a grammar. The worker launches the forward pass
            and samples after SampleInputs of the same step arrived. They always precede the next step; if the next step
            arrives instead, this step is void.
    """

    step: int
    removed: list[int] = []
    parked: list[int] = []
    new_requests: list[NewRequestData] = []
    token_ids: Int32 | None = None
    block_ids: Int32 | None = None
    unparked: list[int] = []
    appended_handles: Int32 | None = None
    appended_block_ids: Int32 | None = None
    appended_groups: Int32 | None = None
    counts: list[tuple[int, int]] = []
    # Reserved: drafts made by the scheduler.
    draft_token_ids: Int32 | None = None
    block_copies: list[tuple[int, int]] = []
    blocks_to_zero: list[int] = []
    awaits_sample_inputs: bool = False
    drafts: list[tuple[int, int]] = []
    forks: list[tuple[int, int]] = []
    chosen: list[tuple[int, int]] = []
    state_slots: Int32 | None = None
    state_copies: list[tuple[int, int]] = []


class Shutdown(Message, frozen=True, tag=32):
    pass


class SampleInputs(Message, frozen=True, tag=33):
    """Token bitmasks that the sampling of a step waits for.

    Attributes:
        step: number of the SchedulerOutput that awaits it.
        handles: requests with constrained tokens.
        counts: number of masked positions of each of them: one more than its drafts in this step.
        bitmask: int32 ``[sum(counts), ceil(vocab_size / 32)]``, row-major: bit ``t % 32`` of word ``t // 32`` is set if
            token ``t`` is allowed.
    """

    step: int
    handles: list[int]
    counts: list[int]
    bitmask: Int32 | None = None


class MemoryPlan(msgspec.Struct, frozen=True):
    """Use of the device's memory in bytes, decided before any weight is read. ``device``: in a Ready, its model."""

    device: str
    total: int
    weights: int
    activations: int
    kv_cache: int
    num_blocks: int
    block_size: int
    """Tokens in the pool's smallest blocks: ``--block-size``, or the next size that the kernels can read."""
    adapters: int = 0
    """Memory of the slots of LoRA adapters, on a GPU."""
    states: int = 0
    """Memory of all slots of recurrent states, and of those of drafts."""
    num_slots: int = 0
    """Slots of recurrent states, slot 0 included; 0 without states."""
    images: int = 0
    """Memory of the encoder cache, and of what encoding one image needs."""


class Ready(Message, frozen=True, tag=40):
    """The worker can run steps.

    Attributes:
        num_blocks: size of the pool per group, the null block included; empty for a model that keeps no KV.
        page_bytes: bytes of a page of this rank, which holds one block; 0 if it cannot store blocks in pages.
        num_slots: size of the pool of state slots, slot 0 included, which no request has; 0 without states.
        files: the checkpoint that was loaded, by its state on this machine, or by its digest on a node; a value that
            no other has if it changed meanwhile; empty for dummy weights.
    """

    num_blocks: list[int]
    plan: MemoryPlan
    timings: dict[str, float]
    page_bytes: int = 0
    files: str = ""
    num_slots: int = 0

    @property
    def pool_size(self) -> int:
        """Blocks of the pool that all groups share; without groups 2, of which one is the null block and one unused."""
        return min(self.num_blocks, default=2)

    @property
    def detail(self) -> dict[str, float]:
        """The seconds of the start, and the size of the pools without the null block and slot 0."""
        pool = {"kv_blocks": min(self.num_blocks, default=1) - 1, "block_size": self.plan.block_size}
        pool["state_slots"] = max(self.num_slots - 1, 0)
        return {**self.timings, "kv_cache_bytes": self.plan.kv_cache, **pool}


class Fault(Message, frozen=True, tag=41):
    """The worker cannot continue. ``kind`` is checkpoint, memory, refused or error; ``text`` is one line."""

    kind: str
    text: str


class ModelRunnerOutput(Message, frozen=True, tag=42):
    """The result of one step.

    Attributes:
        step: number of the SchedulerOutput that it answers.
        tokens: one sampled token for each row that reached its last known position, in row order.
        handles: handles of these rows. None while they are the same as in the last result that had them; never None in
            a step that removed or added a request.
        bad: handles of rows with logits that are not finite.
        counts: number of tokens of each such row (accepted drafts plus one); None when all are 1.
        seconds: duration of the step on the worker, from its beginning to the end of sampling.
        drafts: number of drafts of each such row that were verified in this step; None when all are 0.
        failed: (handle, reason) of requests that cannot continue for a reason of their own: no token is allowed, or a
            logits processor failed for them. Their tokens are meaningless.
        failure: reason why no part of the step was computed (out of device memory), or empty. The worker has dropped
            its rows, and answers steps with empty results until a step has removed all of them.
        side: rows beside the tokens, at most one part of each kind. Pooled rows of a request that computes its last
            token are complete with this result; routed experts are of the positions that a request has computed, or
            found in the prefix cache.
    """

    step: int
    tokens: Int32 | None = None
    handles: Int32 | None = None
    counts: Int32 | None = None
    side: list[SideRows] = []
    bad: list[int] = []
    seconds: float = 0.0
    drafts: Int32 | None = None
    failure: str = ""
    failed: list[tuple[int, str]] = []


class Proposed(Message, frozen=True, tag=45):
    """The drafts of a step that awaits SampleInputs, for which the scheduler must compute a mask per position.

    ``tokens`` has ``counts[i]`` entries for ``handles[i]``; a request without drafts is left out. Sent by rank 0 only,
    and only for a step that awaits SampleInputs and has drafts.
    """

    step: int
    handles: Int32
    counts: Int32
    tokens: Int32


class Digest(Message, frozen=True, tag=44):
    """Sent by every rank after every step: ``value`` is an 8-byte hash of the diff and the sampled tokens.

    A result is committed only when the digests of all ranks for its step are equal.
    """

    step: int
    value: bytes


SideJob: TypeAlias = LoadAdapter | Encode
"""What threads of the workers do beside the steps, one after the other."""
SideJobDone: TypeAlias = AdapterLoaded | Encoded
SchedulerToWorker: TypeAlias = (
    Welcome
    | Refused
    | Heartbeat
    | Configure
    | SchedulerOutput
    | SampleInputs
    | HostPages
    | DiskPages
    | MoveBlocks
    | SideJob
    | Shutdown
)
WorkerToScheduler: TypeAlias = (
    Hello | Heartbeat | Ready | Fault | ModelRunnerOutput | Proposed | Digest | BlocksMoved | DiskContents | SideJobDone
)
