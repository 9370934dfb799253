"""Messages between the scheduler and a worker."""

from typing import TypeAlias

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.link_messages import Heartbeat, Hello, Message, Refused, Welcome
from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs


class Configure(Message, frozen=True, tag=30):
    """``last_step``: the number of the last step before this epoch; the next one follows it.

    ``num_blocks``: of the pool, the null block included, as an earlier group had it; 0: the group decides.
    """

    worker_epoch: int
    kv_layout: KVLayout
    config: EngineConfig
    last_step: int = 0
    num_blocks: int = 0


class NewRequestData(msgspec.Struct, array_like=True, frozen=True):
    """All that a worker row is made of. Its tokens and block ids lie, in this order, in the message's two frames.

    Attributes:
        num_tokens: known tokens, prompt and output, that the token frame holds for it.
        num_computed_tokens: positions whose KV is in the given blocks already.
        num_blocks: ids per group in the block frame.
    """

    handle: int
    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: list[int]
    sampling: SamplingParams
    seed: int


class SchedulerOutput(Message, frozen=True, tag=31):
    """One step, as a diff. A request not named here that is active computes one token.

    Applied in the order: removed and parked, new, unparked, appended, row moves, counts.

    Attributes:
        step: number of the step within the epoch, from 1.
        removed, parked: handles that leave, and that stay without running.
        new_requests: rows to build; ``token_ids`` and ``block_ids`` are their packed arrays.
        unparked: handles that run again.
        appended_handles, appended_block_ids: blocks newly given to held requests, one entry each, in the order in
            which they join the request's table; ``appended_groups`` is absent while all are of group 0.
        counts: (handle, tokens) of each request that computes other than one token in this step.
        drafts: (handle, drafts) of each request that may compute drafts: the last so many of its tokens at most. Which
            they are, and whether there are so many, the worker knows: its proposer makes them as the step begins.
        awaits_sample_inputs: a request that samples in this step has a grammar: the worker launches the forward pass,
            and samples when SampleInputs of the same step are there. They always come before the next step does;
            where they do not come, the step is void.
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
    # Reserved: drafts made by the scheduler, block copies, blocks to zero.
    draft_token_ids: Int32 | None = None
    block_copies: list[tuple[int, int]] = []
    blocks_to_zero: list[int] = []
    awaits_sample_inputs: bool = False
    drafts: list[tuple[int, int]] = []


class Shutdown(Message, frozen=True, tag=32):
    pass


class SampleInputs(Message, frozen=True, tag=33):
    """What the sampling of a step waits for: the tokens that grammars allow.

    Attributes:
        step: the SchedulerOutput that awaits it.
        handles: requests whose tokens are constrained; others are not.
        counts: positions of each of them that have a mask: one more than its drafts in this step.
        bitmask: int32 ``[sum(counts), ceil(vocab_size / 32)]``, row-major: bit ``t % 32`` of word ``t // 32`` is set
            where token ``t`` is allowed.
    """

    step: int
    handles: list[int]
    counts: list[int]
    bitmask: Int32 | None = None


class MemoryPlan(msgspec.Struct, frozen=True):
    """Where the device's memory goes, in bytes, decided before any weight is read."""

    device: str
    total: int
    weights: int
    activations: int
    kv_cache: int
    num_blocks: int
    block_size: int


class Ready(Message, frozen=True, tag=40):
    """The worker can run steps. ``num_blocks``: per group, the null block included."""

    num_blocks: list[int]
    plan: MemoryPlan
    timings: dict[str, float]


class Fault(Message, frozen=True, tag=41):
    """The worker cannot go on; ``kind`` is checkpoint, memory, refused or error; ``text`` is one line."""

    kind: str
    text: str


class ModelRunnerOutput(Message, frozen=True, tag=42):
    """The result of one step.

    Attributes:
        step: the SchedulerOutput that it answers.
        tokens: one sampled token for each row that reached its last known position, in row order.
        handles: of those rows; absent while the same as in the last result that had them, and never absent where the
            step removed or brought a request.
        bad: handles whose logits were not finite.
        counts: tokens of each such row (accepted drafts and one more); absent when all are 1.
        seconds: what the step took the worker, from its beginning to the end of sampling.
        drafts: how many drafts of each such row were verified in this step; absent when all are 0.
        failed: (handle, why) of requests of this step that cannot go on for a reason of their own: no token is
            allowed, or a logits processor failed on them. Their tokens are without meaning.
        failure: why nothing of the step was computed (the device's memory did not suffice); the worker has dropped its
            rows, and answers steps with nothing until one has removed them all.
    """

    step: int
    tokens: Int32 | None = None
    handles: Int32 | None = None
    counts: Int32 | None = None
    logprobs: Logprobs | None = None
    bad: list[int] = []
    seconds: float = 0.0
    drafts: Int32 | None = None
    failure: str = ""
    failed: list[tuple[int, str]] = []
    prompt_logprobs: PromptLogprobs | None = None


class Proposed(Message, frozen=True, tag=45):
    """The drafts of a step that awaits SampleInputs, so that there can be a mask for each position.

    ``tokens`` has ``counts[i]`` entries for ``handles[i]``; a request without drafts is left out. From rank 0,
    and only for a step that awaits SampleInputs and has drafts.
    """

    step: int
    handles: Int32
    counts: Int32
    tokens: Int32


class Digest(Message, frozen=True, tag=44):
    """From every rank of a group, after every step: ``value`` is 8 bytes, a hash over the diff and the sampled tokens.

    A result is committed only when all ranks' digests of its step are equal.
    """

    step: int
    value: bytes


SchedulerToWorker: TypeAlias = Welcome | Refused | Heartbeat | Configure | SchedulerOutput | SampleInputs | Shutdown
WorkerToScheduler: TypeAlias = Hello | Heartbeat | Ready | Fault | ModelRunnerOutput | Proposed | Digest
