"""A worker without a model, built from the protocol page alone: it applies diffs, and distrusts each of them.

Every KV slot remembers what was written to it, as (position, context). A context is a running number over all tokens
up to a position, so that a slot of another request, of other tokens, or never written is seen at once. A token is a
function of the context and of nothing else: what a client gets can be worked out without any scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.protocol.kv_layout import NULL_BLOCK_ID
from quire.protocol.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.scheduler_proc.trace.event_log import appended_blocks

_MASK = (1 << 64) - 1


def extend_context(context: int, token: int) -> int:
    """The context one token further."""
    return ((context ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


def next_token(context: int, vocab_size: int) -> int:
    """What the pretended model says after ``context``."""
    return (context >> 40) % vocab_size


@dataclass
class Row:
    """One request as the worker holds it; ``contexts[i]`` is the context up to token ``i``."""

    handle: int
    request_id: str
    added_in: int
    num_prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    active: bool = True

    def know(self, token: int) -> None:
        self.tokens.append(token)
        self.contexts.append(extend_context(self.contexts[-1] if self.contexts else 0, token))


class FakeWorker:
    """Rows by handle, and the slots. Raises AssertionError at whatever no right scheduler would send.

    Attributes:
        forced: (request id, index of the output token) → the token, instead of the function's.
        bad_from: request id → index of the output token from which its logits are not finite.
        salt_of: request id → cache salt, which no slot may cross.
    """

    def __init__(self, num_blocks: int, block_size: int, max_rows: int, max_tokens: int, vocab_size: int) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.max_rows, self.max_tokens, self.vocab_size = max_rows, max_tokens, vocab_size
        self.rows: dict[int, Row] = {}
        self.holders: dict[int, set[int]] = {}
        self.slots: list[tuple[int, int, str] | None] = [None] * (num_blocks * block_size)
        self.forced: dict[tuple[str, int], int] = {}
        self.bad_from: dict[str, int] = {}
        self.salt_of: Callable[[str], str] = lambda request_id: ""
        self.step = 0
        self._last_handles: list[int] = []

    # ---- the diff

    def execute(self, diff: SchedulerOutput) -> ModelRunnerOutput:
        """Apply, write all rows' slots, read them all back, sample."""
        assert diff.step == self.step + 1, f"step {diff.step} after step {self.step}"
        self.step = diff.step
        self._apply(diff)
        counts = self._counts(diff)
        self._write(counts)
        for handle, count in counts.items():
            self._read(self.rows[handle], count)
        return self._sample(counts)

    def _apply(self, diff: SchedulerOutput) -> None:
        for handle in diff.removed:
            self._let_go(self.rows.pop(handle))
        for handle in diff.parked:
            assert self.rows[handle].active, f"handle {handle} is parked already"
            self.rows[handle].active = False
        self._add(diff)
        for handle in diff.unparked:
            assert not self.rows[handle].active, f"handle {handle} is not parked"
            self.rows[handle].active = True
        for handle, group, block in appended_blocks(diff):
            assert group == 0
            self._hold(self.rows[handle], block, shared=False)
        assert len(self.rows) <= self.max_rows, "more requests than max_num_seqs"

    def _let_go(self, row: Row) -> None:
        for block in row.blocks:
            self.holders[block].remove(row.handle)

    def _add(self, diff: SchedulerOutput) -> None:
        tokens = [] if diff.token_ids is None else diff.token_ids.tolist()
        blocks = [] if diff.block_ids is None else diff.block_ids.tolist()
        for new in diff.new_requests:
            assert new.handle not in self.rows, f"handle {new.handle} is held already"
            self._add_row(new, tokens[: new.num_tokens], blocks[: new.num_blocks[0]])
            del tokens[: new.num_tokens], blocks[: new.num_blocks[0]]
        assert not tokens and not blocks, "packed arrays are longer than the requests say"

    def _add_row(self, new: NewRequestData, tokens: list[int], blocks: list[int]) -> None:
        row = Row(new.handle, new.request_id, self.step, new.num_prompt_tokens, num_computed=new.num_computed_tokens)
        for token in tokens:
            row.know(token)
        assert 0 <= row.num_computed < len(tokens), "nothing is left to compute, so there are no logits"
        assert row.num_computed % self.block_size == 0, "only full blocks can be shared"
        self.rows[new.handle] = row
        for index, block in enumerate(blocks):
            self._hold(row, block, shared=index < row.num_computed // self.block_size)

    def _hold(self, row: Row, block: int, *, shared: bool) -> None:
        assert NULL_BLOCK_ID < block < self.num_blocks, f"block {block} cannot be given to a request"
        holders = self.holders.setdefault(block, set())
        # Requests that come in this very step may share already what this step is going to write.
        earlier = [h for h in holders if self.rows[h].added_in < self.step]
        assert shared or not earlier, f"block {block} is given to {row.handle} while {earlier} hold it"
        assert row.handle not in holders, f"block {block} stands twice in one table"
        holders.add(row.handle)
        row.blocks.append(block)

    def _counts(self, diff: SchedulerOutput) -> dict[int, int]:
        """Tokens that each row computes in this step."""
        counts = {handle: 1 for handle, row in self.rows.items() if row.active}
        for handle, count in diff.counts:
            assert handle in counts and count > 1, f"count {count} for handle {handle}"
            counts[handle] = count
        assert 0 < sum(counts.values()) <= self.max_tokens, "token budget exceeded, or an empty step"
        return counts

    # ---- the step

    def _slot(self, row: Row, position: int) -> int:
        assert position // self.block_size < len(row.blocks), f"position {position} of {row.request_id} has no block"
        return row.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, counts: dict[int, int]) -> None:
        written: set[int] = set()
        for handle, count in counts.items():
            row = self.rows[handle]
            assert row.num_computed + count <= len(row.tokens), "computes tokens that nobody knows"
            for position in range(row.num_computed, row.num_computed + count):
                slot = self._slot(row, position)
                assert slot not in written, f"two rows write slot {slot} in one step"
                written.add(slot)
                others = self.holders[slot // self.block_size] - {handle}
                # Who came in this very step may share what this step writes; who came earlier reads it already.
                assert all(self.rows[o].added_in == self.step for o in others), f"slot {slot} is shared, not writable"
                self.slots[slot] = (position, row.contexts[position], row.request_id)

    def _read(self, row: Row, count: int) -> None:
        row.num_computed += count
        for position in range(row.num_computed):
            held = self.slots[self._slot(row, position)]
            assert held is not None, f"{row.request_id} reads position {position}, which was never written"
            assert held[:2] == (position, row.contexts[position]), f"{row.request_id} reads {held} at {position}"
            assert self.salt_of(held[2]) == self.salt_of(row.request_id), f"salts mix: {held[2]}, {row.request_id}"

    def _sample(self, counts: dict[int, int]) -> ModelRunnerOutput:
        handles, tokens, bad = [], [], []
        for handle in counts:
            row = self.rows[handle]
            if row.num_computed < len(row.tokens):
                continue
            index = len(row.tokens) - row.num_prompt_tokens
            token = next_token(row.contexts[-1], self.vocab_size)
            token = self.forced.get((row.request_id, index), token)
            if index >= self.bad_from.get(row.request_id, index + 1):
                bad.append(handle)
            row.know(token)
            handles.append(handle)
            tokens.append(token)
        changed = handles != self._last_handles
        self._last_handles = handles
        return ModelRunnerOutput(
            step=self.step,
            tokens=np.array(tokens, np.int32) if tokens else None,
            handles=np.array(handles, np.int32) if changed else None,
            bad=bad,
        )
