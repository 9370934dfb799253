"""A worker without a model, built from the protocol page alone: it applies diffs and checks each of them.

Every KV slot remembers what was written to it: a tag of the group, the cache salt and the *context*, a running number
over all tokens up to a position. A slot of another request, of other tokens, or never written is therefore seen at
once. A token is a function of the context alone, so that a client's tokens can be computed without a scheduler.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import msgspec
import numpy as np
from fake_adapters import FakeAdapters
from fake_items import FakeItems, mixes_of
from fake_pages import FakePages
from fake_states import FakeStates
from log_replay import appended_blocks
from side_parts import with_rows

from quire.protocol.model.kv_layout import NULL_BLOCK_ID, KVGroup
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.side_rows import LOGPROBS, POOLED, PROMPT_LOGPROBS, ROUTED_EXPERTS, Rows, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput

_MASK = (1 << 64) - 1
_STATE = 1 << 32
"""The group of states, in tags."""
_NOTHING = -1
"""The tag of a slot that was never written, or that holds a rejected draft."""


def extend_context(context: int, token: int) -> int:
    """Return the context one token further."""
    return ((context ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


def contexts_of(tokens: list[int]) -> list[int]:
    """Return the context up to each token."""
    contexts = [0]
    for token in tokens:
        contexts.append(extend_context(contexts[-1], token))
    return contexts[1:]


def next_token(context: int, vocab_size: int) -> int:
    """Return the token that the fake model samples after ``context``."""
    return (context >> 40) % vocab_size


def candidates_after(context: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return (token, log probability) of the tokens that the fake model thinks most likely after ``context``."""
    found: dict[int, float] = {}
    while len(found) < count:
        context = extend_context(context, len(found))
        found.setdefault(next_token(context, vocab_size), -0.1 - 0.25 * len(found) - (context >> 50) / 2**17)
    return list(found.items())


def prompt_logprob(context: int) -> float:
    """Return the log probability of the prompt token with which the context becomes this one."""
    return -float(context % 97)


def prompt_logprobs_of(prompt: list[int]) -> dict[int, tuple[int, float]]:
    """Return the log probabilities of the tokens of a prompt, by position, without the first."""
    contexts = contexts_of(prompt)
    return {at: (token, prompt_logprob(contexts[at])) for at, token in enumerate(prompt) if at}


def pooled_row(context: int, width: int) -> list[float]:
    """Return the row that the fake model makes of the hidden state after ``context``."""
    return [float((context >> 8 + 3 * at) % 9973) for at in range(width)]


def routed_row(context: int) -> list[int]:
    """Return the experts to which the fake model routes the position with which the context becomes this one."""
    return [context % 61, (context >> 8) % 61]


def first_read(group: KVGroup, position: int) -> int:
    """Return the first position whose content the token at ``position`` reads, by docs/kv_cache.md."""
    if group.kind == "sliding_window":
        return max(0, position - group.window + 1)
    if group.kind == "chunked_local":
        return position - position % group.window
    return 0


@dataclass
class Row:
    """One request as the worker holds it; ``contexts[i]`` is the context up to token ``i``.

    ``tables``: block ids per group; entries that no later position reads may belong to other requests by now.
    ``prompt_width``: log probabilities per prompt token; 0 for none. ``num_candidates``: those of a sampled token.
    ``adapter``: number of its adapter, or 0. ``num_routed``: positions with routed experts sent; -1: not requested.
    ``slot``: that of its state.
    """

    handle: int
    request_id: str
    added_in: int
    num_prompt_tokens: int
    salt: int
    tables: list[list[int]]
    tokens: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    num_computed: int = 0
    slot: int = 0
    prompt_width: int = 0
    num_candidates: int = 0
    is_search: bool = False
    active: bool = True
    adapter: int = 0
    pooling: PoolingParams | None = None
    num_routed: int = -1
    items: list[InputItem] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """The block ids of group 0."""
        return self.tables[0]

    def choose(self, token: int) -> None:
        """Replace the last token, which was sampled and is not computed."""
        assert self.num_computed == len(self.tokens) - 1 >= self.num_prompt_tokens, "a token that was not sampled"
        del self.tokens[-1], self.contexts[-1]
        self.know(token)

    def know(self, token: int, mix: int = 0) -> None:
        """``mix``: what the position has in place of the token's embedding."""
        self.tokens.append(token)
        self.contexts.append(extend_context(self.contexts[-1] if self.contexts else 0, token ^ mix))


@dataclass
class Chunk:
    """What one row computes in a step: ``drafts`` are its last tokens, of which ``num_accepted`` are correct.
    ``pools``: it completes what its prompt is turned into, and samples nothing."""

    row: Row
    start: int
    num_known: int
    samples: bool
    drafts: list[int]
    num_accepted: int = 0
    pools: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_known + len(self.drafts)

    @property
    def kept_end(self) -> int:
        return self.start + self.num_known + self.num_accepted


class FakeWorker:
    """Rows by handle, and the slots. Raises AssertionError on any diff that no correct scheduler would send.

    Attributes:
        groups: the groups of the layout; by default one of full attention.
        forced: (request id, index of the output token) → the token, instead of the function's.
        bad_from: request id → index of the output token from which its logits are not finite.
        bad_once: (request id, output tokens including this one) whose logits are not finite when first sampled.
        salt_of: request id → cache salt; requests with different salts may not share slots.
        first_of_epoch: step whose result always lists its handles.
        failed_at: request id → index of the output token from which it fails for a reason of its own.
        num_speculative_tokens: most drafts per row and step; 0 for no proposer.
        draft_rng, draft_quality: random number of drafts up to the allowed one; probability that a draft is right.
        step_seconds: (tokens, drafts) → the reported duration of the step; 0: not measured.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_tokens: int,
        vocab_size: int,
        *,
        groups: list[KVGroup] | None = None,
        caching: bool = True,
        num_speculative_tokens: int = 0,
        max_loras: int = 0,
        max_cpu_loras: int = 0,
        pooling: PoolingConfig | None = None,
        num_slots: int = 0,
        num_state_parts: int = 1,
        encoder_cache_tokens: int = 0,
    ) -> None:
        self.items = FakeItems(encoder_cache_tokens)
        self.adapters = FakeAdapters(max_loras, max_cpu_loras)
        self.num_blocks, self.max_rows, self.max_tokens, self.vocab_size = num_blocks, max_rows, max_tokens, vocab_size
        self.states = FakeStates(num_slots, lambda row, context: self._tag(row, _STATE, context), num_state_parts)
        self.groups = [KVGroup("full_attention", block_size, [0])] if groups is None else groups
        self.pooling = pooling
        self.num_speculative_tokens = num_speculative_tokens
        self.sizes = [g.block_size for g in self.groups]
        self.rows: dict[int, Row] = {}
        self.holders: dict[int, dict[int, tuple[int, int]]] = {}
        """Block → handle → (group, index in its table)."""
        widest = max((g.block_size for g in self.groups), default=1)
        self.slots = [[_NOTHING] * widest for _ in range(num_blocks)]
        self.host = FakePages(self._contents)
        self.forced: dict[tuple[str, int], int] = {}
        self.bad_from: dict[str, int] = {}
        self.bad_once: set[tuple[str, int]] = set()
        self.failed_at: dict[str, int] = {}
        self.salt_of: Callable[[str], str] = lambda request_id: ""
        self.draft_rng, self.draft_quality = random.Random(0), 0.6
        self.step_seconds: Callable[[int, int], float] = lambda num_tokens, num_drafts: 0.0
        self.step = 0
        self.first_of_epoch = 1
        self.num_accepted_drafts = self.num_rejected_drafts = 0
        self._last_handles: list[int] = []

    def forget_everything(self, last_step: int) -> None:
        """Become a new process; the next step is the one after ``last_step``. Host memory stays."""
        self.host.pending.clear()
        self.adapters.forget()
        self.items.forget()
        self.states.forget()
        self.rows.clear()
        self.holders.clear()
        self.slots = [[_NOTHING] * len(self.slots[0]) for _ in range(self.num_blocks)]
        self.step, self.first_of_epoch = last_step, last_step + 1
        self._last_handles = []

    # ---- the diff

    def execute(self, diff: SchedulerOutput) -> ModelRunnerOutput:
        """Apply the diff, write all rows' slots, read them all back, sample."""
        return self.finish(self.launch(diff))

    def launch(self, diff: SchedulerOutput) -> list[Chunk]:
        """Run the part before sampling: apply the diff and propose drafts."""
        assert diff.step == self.step + 1, f"step {diff.step} after step {self.step}"
        self.step = diff.step
        self._apply(diff)
        return self._chunks(diff)

    def finish(self, chunks: list[Chunk]) -> ModelRunnerOutput:
        """Run the rest of the newest launched step."""
        self._write(chunks)
        for chunk in chunks:
            self._read(chunk)
        prompts = self._prompt_logprobs(chunks)
        result = self._pool(chunks, with_rows(self._sample(chunks), PROMPT_LOGPROBS, prompts))
        return with_rows(result, ROUTED_EXPERTS, self._routed_experts(chunks))  # type: ignore[no-any-return]

    def _pool(self, chunks: list[Chunk], result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Return the result with the pooled rows. Those of bad requests are not numbers; failed ones have none."""
        parts, bad, failed = [], [*result.bad], [*result.failed]
        for chunk in chunks:
            row, params = chunk.row, chunk.row.pooling
            if params is None:
                continue
            each = params.task == "token_embed"
            if not each and not chunk.pools:
                continue
            assert self.pooling is not None
            width = self.pooling.width(params.task, params.dimensions)
            contexts = row.contexts[chunk.start : chunk.end] if each else row.contexts[-1:]
            rows = np.array([pooled_row(c ^ self.adapters.mix(row.adapter), width) for c in contexts], np.float32)
            once = (row.request_id, 1)
            if chunk.pools and (self.bad_from.get(row.request_id) == 0 or once in self.bad_once):
                self.bad_once.discard(once)
                bad.append(row.handle)
                rows[:] = np.nan
            if chunk.pools and self.failed_at.get(row.request_id) == 0:
                failed.append((row.handle, "no reason"))
                continue
            parts.append((row.handle, chunk.start if each else 0, [rows]))
        result = msgspec.structs.replace(result, bad=bad, failed=failed)
        return with_rows(result, POOLED, SideRows.of(POOLED, parts))  # type: ignore[no-any-return]

    def _routed_experts(self, chunks: list[Chunk]) -> list[SideRows]:
        """Return those of the positions of each sampling row that were not sent yet. Rows must be settled."""
        parts = []
        for chunk in chunks:
            row = chunk.row
            if row.num_routed >= 0 and chunk.samples and row.num_computed > row.num_routed:
                rows = [routed_row(context) for context in row.contexts[row.num_routed : row.num_computed]]
                parts.append((row.handle, row.num_routed, [np.array(rows, np.int32)]))
                row.num_routed = row.num_computed
        return SideRows.of(ROUTED_EXPERTS, parts)

    def _prompt_logprobs(self, chunks: list[Chunk]) -> list[SideRows]:
        """Return a part for each chunk that has a successor in its prompt: see ``prompt_logprob``."""
        parts: list[tuple[int, int, Rows]] = []
        for chunk in chunks:
            row, start = chunk.row, chunk.start + 1
            end = min(start + chunk.num_known, row.num_prompt_tokens)
            if row.prompt_width and end > start:
                found = [(row.tokens[at], prompt_logprob(row.contexts[at])) for at in range(start, end)]
                parts.append((row.handle, start, logprob_rows([[each] * row.prompt_width for each in found])))
        return SideRows.of(PROMPT_LOGPROBS, parts)

    def _apply(self, diff: SchedulerOutput) -> None:
        if diff.removed or diff.new_requests:
            self._last_handles = [-1]  # the next result has to send its handles
        for handle in diff.removed:
            self._let_go(self.rows.pop(handle))
        for handle in diff.parked:
            assert self.rows[handle].active, f"handle {handle} is parked already"
            self.rows[handle].active = False
        self._add(diff)
        for handle in diff.unparked:
            assert not self.rows[handle].active, f"handle {handle} is not parked"
            self.rows[handle].active = True
        for handle, token in diff.chosen:
            self.rows[handle].choose(token)
        for handle, group, block in appended_blocks(diff):
            self._hold(self.rows[handle], group, block, shared=False)
        targets = [target for _, target in diff.block_copies]
        for source, target in diff.block_copies:
            assert targets.count(target) == 1 and source not in targets, f"order of the copy {source} to {target}"
            assert len(self._readers(target)) <= 1, f"block {target} is copied to, and is of several requests"
            self.slots[target] = self.slots[source].copy()
        self.states.apply(diff, self.rows)
        assert len(self.rows) <= self.max_rows, "more requests than max_num_seqs"

    def _let_go(self, row: Row) -> None:
        for table in row.tables:
            for block in table:
                self.holders.get(block, {}).pop(row.handle, None)

    def _add(self, diff: SchedulerOutput) -> None:
        tokens = [] if diff.token_ids is None else diff.token_ids.tolist()
        blocks = [] if diff.block_ids is None else diff.block_ids.tolist()
        for new in diff.new_requests:
            assert new.handle not in self.rows, f"handle {new.handle} is held already"
            assert len(new.num_blocks) == len(self.groups)
            copied = dict(diff.forks).get(new.handle) is not None or {target for _, target in diff.block_copies}
            self._add_row(new, tokens[: new.num_tokens], blocks[: sum(new.num_blocks)], copied)
            del tokens[: new.num_tokens], blocks[: sum(new.num_blocks)]
        assert not tokens and not blocks, "packed arrays are longer than the requests say"

    def _add_row(self, new: NewRequestData, tokens: list[int], blocks: list[int], copied: set[int] | bool) -> None:
        """``copied``: blocks that a copy fills in part; True for a forked row, which gets its copies later."""
        salt = crc32(self.salt_of(client_id(new.request_id)).encode())
        tables: list[list[int]] = [[] for _ in self.groups]
        row = Row(new.handle, new.request_id, self.step, new.num_prompt_tokens, salt, tables)
        row.num_computed = new.num_computed_tokens
        wanted = new.sampling.prompt_logprobs
        row.prompt_width = 0 if wanted is None else wanted + 1
        row.num_candidates = new.sampling.num_candidates or 0
        row.is_search = new.sampling.use_beam_search
        row.adapter = new.adapter
        row.pooling = new.pooling
        row.num_routed = 0 if new.sampling.return_routed_experts else -1
        if new.pooling is not None:
            assert self.pooling is not None and new.num_tokens == new.num_prompt_tokens
            assert not row.num_computed or not self.pooling.needs_every_token(new.pooling.task), "tokens are missing"
        assert not row.prompt_width or not row.num_computed, "a cached prefix has no logits"
        row.items = new.items
        mixes = mixes_of(self.items.of(client_id(new.request_id)))
        for at, token in enumerate(tokens):
            assert 0 <= token < self.vocab_size, f"token {token}: a placeholder reached the model"
            row.know(token, mixes.get(at, 0))
        assert 0 <= row.num_computed < len(tokens) + (copied is True), "nothing is left to compute: there are no logits"
        self.rows[new.handle] = row
        for group, count in enumerate(new.num_blocks):
            if row.num_computed % self.sizes[group] and copied is not True:
                assert blocks[row.num_computed // self.sizes[group]] in copied, "only full blocks can be shared"
            for block in blocks[:count]:
                shared = len(row.tables[group]) < row.num_computed // self.sizes[group]
                self._hold(row, group, block, shared=shared)
            del blocks[:count]

    def _hold(self, row: Row, group: int, block: int, *, shared: bool) -> None:
        index = len(row.tables[group])
        row.tables[group].append(block)
        if block == NULL_BLOCK_ID:
            assert self.groups[group].kind != "full_attention", "the null block under full attention"
            return
        assert NULL_BLOCK_ID < block < self.num_blocks, f"block {block} cannot be given to a request"
        holders = self._readers(block)
        # Requests that are added in this step may already share blocks that it writes.
        earlier = [h for h in holders if self.rows[h].added_in < self.step]
        assert shared or not earlier, f"block {block} is given to {row.handle} while {earlier} hold it"
        assert row.handle not in holders, f"block {block} stands twice in the tables of {row.request_id}"
        assert all(where == (group, index) for where in holders.values()), f"block {block} is another group's"
        holders[row.handle] = (group, index)

    def _readers(self, block: int) -> dict[int, tuple[int, int]]:
        """Return the requests that may still read ``block``; holders that are past it are removed (protocol law 7)."""
        holders = self.holders.setdefault(block, {})
        for handle, (group, index) in list(holders.items()):
            if (index + 1) * self.sizes[group] <= first_read(self.groups[group], self.rows[handle].num_computed):
                del holders[handle]
        return holders

    def _chunks(self, diff: SchedulerOutput) -> list[Chunk]:
        """Return what each row computes in this step."""
        counts = {handle: 1 for handle, row in self.rows.items() if row.active}
        for handle, count in diff.counts:
            assert handle in counts and count > 1, f"count {count} for handle {handle}"
            counts[handle] = count
        for handle, parent in diff.forks:
            del counts[handle]
            row, of = self.rows[handle], self.rows[parent]
            assert of.num_computed + counts[parent] == row.num_computed and of.contexts == row.contexts, "wrong parent"
        assert 0 < sum(counts.values()) <= self.max_tokens, "token budget exceeded, or an empty step"
        used = {row.adapter for row in self.rows.values() if row.active and row.adapter}
        assert len(used) <= self.adapters.max_active, f"a step uses adapters {sorted(used)}"
        drafts = dict(diff.drafts)
        assert drafts.keys() <= counts.keys() and all(0 < drafts[h] < counts[h] for h in drafts), "odd drafts"
        chunks = [self._chunk(self.rows[handle], count, drafts.get(handle, 0)) for handle, count in counts.items()]
        return chunks + [Chunk(row, row.num_computed, 0, True, []) for row in (self.rows[h] for h, _ in diff.forks)]

    def _chunk(self, row: Row, count: int, most_drafts: int) -> Chunk:
        """Propose drafts: as many as allowed, or fewer."""
        start, num_known = row.num_computed, count - most_drafts
        num_drafts = self.draft_rng.randint(0, most_drafts) if most_drafts else 0
        assert start + num_known <= len(row.tokens), f"{row.request_id} computes tokens that nobody knows"
        assert most_drafts <= self.num_speculative_tokens, f"{row.request_id}: {most_drafts} drafts are too many"
        self._check_blocks(row, start + count)
        self.items.check(client_id(row.request_id), row.items, start, start + num_known)
        samples = start + num_known == len(row.tokens)
        assert samples or not most_drafts, "drafts before the prompt is computed"
        if row.pooling is not None:
            assert not most_drafts, "drafts of a request that samples nothing"
            return Chunk(row, start, num_known, False, [], pools=samples)
        chunk = Chunk(row, start, num_known, samples, [])
        context, right = row.contexts[-1], True
        for ahead in range(num_drafts):
            token = self._answer(row, len(row.tokens) + ahead, context)
            if right and self.draft_rng.random() >= self.draft_quality:
                token, right = (token + 1) % self.vocab_size, False
            chunk.num_accepted += right
            chunk.drafts.append(token)
            context = extend_context(context, token)
        self.num_accepted_drafts += chunk.num_accepted
        self.num_rejected_drafts += num_drafts - chunk.num_accepted
        return chunk

    def _check_blocks(self, row: Row, end: int) -> None:
        """The blocks have room for all allowed drafts, even if fewer are proposed."""
        for group, size in enumerate(self.sizes):
            assert len(row.tables[group]) * size >= end, f"{row.request_id}: no block for {end} in group {group}"

    # ---- the step

    def _tag(self, row: Row, group: int, context: int) -> int:
        return context ^ (row.salt << 8) ^ group ^ self.adapters.mix(row.adapter)

    def _entry(self, row: Row, group: int, position: int) -> int:
        """Return the block of a position that is read or written."""
        index = position // self.sizes[group]
        assert index < len(row.tables[group]), f"position {position} of {row.request_id} has no block in group {group}"
        block = row.tables[group][index]
        assert block != NULL_BLOCK_ID, f"{row.request_id} needs position {position} of group {group}, which is null"
        holders = self.holders[block]
        assert holders.get(row.handle) == (group, index), f"{row.request_id} uses block {block}, which it does not hold"
        return block

    def _own(self, row: Row, group: int, position: int) -> list[int]:
        """Return the slots of the block of ``position`` for writing."""
        block = self._entry(row, group, position)
        others = self._readers(block).keys() - {row.handle}
        # A request that was added in this step may share what the step writes; an older one already reads it.
        assert all(self.rows[o].added_in == self.step for o in others), f"block {block} is shared, not writable"
        return self.slots[block]

    def _write(self, chunks: list[Chunk]) -> None:
        written: set[tuple[int, int]] = set()
        for chunk in chunks:
            row, kept = chunk.row, chunk.start + chunk.num_known
            contexts = row.contexts[chunk.start : kept]
            for token in chunk.drafts:
                contexts.append(extend_context(contexts[-1], token))
            for group, size in enumerate(self.sizes):
                for position, context in enumerate(contexts, chunk.start):
                    slots = self._own(row, group, position)
                    key = (row.tables[group][position // size], position % size)
                    assert key not in written, f"two rows write slot {key} in one step"
                    written.add(key)
                    slots[position % size] = self._tag(row, group, context)

    def _read(self, chunk: Chunk) -> None:
        """Check that every position that the chunk sees holds the content of exactly these tokens."""
        row = chunk.row
        known = chunk.start + chunk.num_known
        if known == chunk.start:  # forked: it samples from the logits of another row
            return
        self.states.read(row, chunk.start)
        for group, spec in enumerate(self.groups):
            size = self.sizes[group]
            position = first_read(spec, chunk.start)
            while position < known:
                end = min(position // size * size + size, known)
                first = position % size
                found = self.slots[self._entry(row, group, position)][first : first + end - position]
                want = [self._tag(row, group, context) for context in row.contexts[position:end]]
                assert found == want, f"{row.request_id} reads what is not its own in {position}..{end}, group {group}"
                position = end

    # ---- results

    def _answer(self, row: Row, index: int, context: int) -> int:
        """Return the token at ``index`` of the row, the one after ``context``."""
        told = self.forced.get((row.request_id, index - row.num_prompt_tokens))
        return next_token(context ^ self.adapters.mix(row.adapter), self.vocab_size) if told is None else told

    def _settle(self, chunk: Chunk) -> list[int]:
        """Advance the row by its computed and accepted tokens and return the new ones. Rejected drafts leave
        garbage."""
        row = chunk.row
        row.num_computed = chunk.kept_end
        for group, size in enumerate(self.sizes):
            for position in range(chunk.kept_end, chunk.end):
                self.slots[row.tables[group][position // size]][position % size] = _NOTHING
        for token in chunk.drafts[: chunk.num_accepted]:
            row.know(token)
        if chunk.num_known:
            self.states.write(row)
        if not chunk.samples:
            return []
        row.know(self._answer(row, len(row.tokens), row.contexts[-1]))
        return row.tokens[-1 - chunk.num_accepted :]

    def _contents(self, block: int, group: int) -> list[int]:
        """Return what a page holds: the slots of a block, or a part of a slot of states."""
        part = group - len(self.groups)
        return self.slots[block] if part < 0 else self.states.slots[block][part]

    def candidates(self, row: Row, context: int) -> list[tuple[int, float]]:
        """Return the most likely tokens of a beam; those that its grammar excludes have a log probability of -inf."""
        return candidates_after(context, row.num_candidates, self.vocab_size)

    def _sample(self, chunks: list[Chunk]) -> ModelRunnerOutput:
        handles, tokens, counts, bad, drafts = [], [], [], [], []
        failed = []
        logprobs: list[tuple[int, int, Rows]] = []
        for chunk in chunks:
            row, sampled = chunk.row, self._settle(chunk)
            if not sampled:
                continue
            if row.num_candidates:
                context = row.contexts[-2] ^ self.adapters.mix(row.adapter)
                found = self.candidates(row, context)
                logprobs.append((row.handle, 0, logprob_rows([[(token, 0.0), *found] for token in sampled])))
            num_output = len(row.tokens) - row.num_prompt_tokens
            once = (row.request_id, num_output)
            if num_output > self.bad_from.get(client_id(row.request_id), 1 << 40) or once in self.bad_once:
                self.bad_once.discard(once)
                bad.append(row.handle)
            if num_output > self.failed_at.get(client_id(row.request_id), 1 << 40):
                failed.append((row.handle, "no token is allowed"))
            handles.append(row.handle)
            counts.append(len(sampled))
            drafts.append(len(chunk.drafts))
            tokens += sampled
        changed = handles != self._last_handles or self.step == self.first_of_epoch
        self._last_handles = handles
        return ModelRunnerOutput(
            step=self.step,
            tokens=np.array(tokens, np.int32) if tokens else None,
            handles=np.array(handles, np.int32) if changed else None,
            counts=np.array(counts, np.int32) if set(counts) - {1} else None,
            bad=bad,
            seconds=self.step_seconds(sum(c.end - c.start for c in chunks), sum(drafts)),
            drafts=np.array(drafts, np.int32) if any(drafts) else None,
            failed=failed,
            side=SideRows.of(LOGPROBS, logprobs),
        )


def client_id(request_id: str) -> str:
    """Return the id of the client's request: that of a beam begins with it."""
    return request_id.split("/", 1)[0]


def logprob_rows(found: list[list[tuple[int, float]]]) -> Rows:
    """``found``: (token, log probability) of the token itself and of the most likely ones, for each token."""
    ids, values = (np.array([[each[at] for each in own] for own in found], t) for at, t in ((0, np.int32), (1, "f4")))
    return [ids, np.ones((len(found), 1), np.int32), values]
