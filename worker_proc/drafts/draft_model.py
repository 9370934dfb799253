"""A second, smaller model of the same vocabulary that drafts, with a KV cache of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.batch.block_table import BlockTable
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.drafts.draft_sampling import DraftSampler
from quire.worker_proc.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model and the memory behind its blocks.

    Attributes:
        kv_caches: one per layer; all layers use the same blocks, for all of a row's tokens.
        num_blocks: of the pool, the null block included.
    """

    model: Decoder
    backend: AttentionBackend
    kv_caches: list[torch.Tensor]
    block_size: int
    num_blocks: int


class DraftModelProposer:
    """Runs the draft model over the tokens that it has not seen, then lets it go on by itself; a RowStore.

    Owns the draft model's blocks, and how far each row's keys and values are those of its tokens. Rows whose draft
    model is behind catch up by at most ``max_step_tokens`` tokens a step in all, the nearest first, and have no drafts
    until they are there; nor has a row for which there are no blocks left. So drafts never hold a step up for long.

    Draft tokens are drawn as the request's own are, with the same noise: two models that agree on a distribution
    agree on the token.
    """

    def __init__(
        self,
        draft: DraftModel,
        batch: InputBatch,
        device: torch.device,
        max_drafts: int,
        max_step_tokens: int,
        sampler: DraftSampler,
    ) -> None:
        self._draft = draft
        self._batch = batch
        self._max_step_tokens = max_step_tokens
        self.sampler = sampler
        max_rows, max_len = batch.tokens.data.shape
        self._max_len = min(max_len, draft.model.config.max_position)
        table = BlockTable(draft.block_size, max_rows, max_len, draft.num_blocks, device)
        self._tables = MultiGroupBlockTable([table])
        self._table = table
        self._free = list(range(1, draft.num_blocks))[::-1]
        self._num_cached = np.zeros(max_rows, np.int64)
        # What was drafted last, behind how many tokens: of these the model has run all but the last.
        self._drafts = np.zeros((max_rows, max_drafts), np.int64)
        self._num_drafts = np.zeros(max_rows, np.int64)
        self._drafted_from = np.zeros(max_rows, np.int64)
        self._transfer = Transfer(device)
        config = draft.model.config
        sources = [config.cache_source(layer) for layer in range(config.num_layers)]
        self._windows = [config.window(source) for source in sources]
        batch.register(self)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self.sampler.begin()
        rows, most = self._allowed(wanted)
        if not len(rows):
            return {}
        self._settle(rows)
        rows, most, counts = self._share_out(rows, most)
        known = self._batch.tokens.length[rows].astype(np.int64)
        hidden = self._forward(rows, self._num_cached[rows], counts, None)
        self._num_cached[rows] += counts
        there = np.flatnonzero(self._num_cached[rows] == known)
        if not len(there):
            return {}
        ends = torch.from_numpy(np.cumsum(counts)[there] - 1).to(hidden.device)
        return self._go_on(rows[there], most[there], known[there], self._draft.model.logits(hidden[ends]))

    def _allowed(self, wanted: Mapping[int, int]) -> tuple[Ints, Ints]:
        """Rows, ascending, and how many drafts each may have: the draft model too has a longest text."""
        rows = np.array(sorted(wanted), np.int64)
        most = np.array([wanted[row] for row in rows.tolist()], np.int64)
        most = np.minimum(most, self._max_len - self._batch.tokens.length[rows])
        held = np.array([self._reserve(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)])
        self._tables.commit()
        fits = (most > 0) & held
        return rows[fits], most[fits]

    def _reserve(self, row: int, num_drafts: int) -> bool:
        """Blocks for a row's tokens and its drafts; false where there are not enough."""
        end = int(self._batch.tokens.length[row]) + num_drafts
        lacking = -(-end // self._draft.block_size) - int(self._table.num_blocks_per_row[row])
        if lacking > len(self._free):
            return False
        if lacking > 0:
            self._table.append_row(row, [self._free.pop() for _ in range(lacking)])
        return True

    def _settle(self, rows: Ints) -> None:
        """Of what was drafted last, keys and values of as much stand as became the rows' text."""
        column = self._batch.tokens
        length = column.length[rows].astype(np.int64)
        step = np.arange(self._drafts.shape[1])
        at = self._drafted_from[rows][:, None] + step
        run = (step < self._num_drafts[rows][:, None] - 1) & (at < length[:, None] - 1)
        right = run & (self._drafts[rows] == column.data[rows[:, None], np.where(run, at, 0)])
        self._num_cached[rows] += np.minimum.accumulate(right, axis=1).sum(axis=1)
        self._num_drafts[rows] = 0

    def _share_out(self, rows: Ints, most: Ints) -> tuple[Ints, Ints, Ints]:
        """Which rows run how many of the tokens that they lack: within the step's tokens, who lacks least first."""
        lacking = self._batch.tokens.length[rows] - self._num_cached[rows]
        order = np.argsort(lacking, kind="stable")
        before = np.cumsum(lacking[order]) - lacking[order]
        counts = np.zeros(len(rows), np.int64)
        counts[order] = np.clip(self._max_step_tokens - before, 0, lacking[order])
        some = counts > 0
        return rows[some], most[some], counts[some]

    def _go_on(self, rows: Ints, most: Ints, known: Ints, logits: torch.Tensor) -> dict[int, list[int]]:
        """Draft from ``logits`` on, float32 ``[rows, vocab]``; those of the first draft."""
        drafts = [(rows, self.sampler.sample(logits, rows, 0))]
        for step in range(1, int(most.max())):
            going = np.flatnonzero(most > step)
            tokens = drafts[-1][1]
            if len(going) < len(rows):
                tokens = tokens[torch.from_numpy(going).to(tokens.device)]
                rows, most, known = rows[going], most[going], known[going]
            hidden = self._forward(rows, known + step - 1, np.ones(len(rows), np.int64), tokens)
            drafts.append((rows, self.sampler.sample(self._draft.model.logits(hidden), rows, step)))
        return self._take(drafts)

    def _take(self, drafts: list[tuple[Ints, torch.Tensor]]) -> dict[int, list[int]]:
        """The drafts of each step on the host; waits for the device."""
        first = drafts[0][0]
        self._drafted_from[first] = self._batch.tokens.length[first]
        found: dict[int, list[int]] = {row: [] for row in first.tolist()}
        flat = torch.cat([tokens for _, tokens in drafts]).cpu().numpy()
        ends = np.cumsum([len(rows) for rows, _ in drafts])
        for step, ((rows, _), tokens) in enumerate(zip(drafts, np.split(flat, ends[:-1]), strict=True)):
            self._drafts[rows, step] = tokens
            self._num_drafts[rows] = step + 1
            for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                found[row].append(token)
        return found

    def _forward(self, rows: Ints, starts: Ints, counts: Ints, tokens: torch.Tensor | None) -> torch.Tensor:
        """Run ``counts`` tokens of each row from position ``starts`` on: ``[num_tokens, hidden_size]``.

        Args:
            tokens: int64 ``[num_tokens]`` on the device; None: they are the rows' own, which the host has.
        """
        positions = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        token_rows = np.repeat(rows, counts)
        query_lens, seq_lens = counts.astype(np.int32), (starts + counts).astype(np.int32)
        ids = np.zeros(0, np.int64)
        if tokens is None:
            ids = self._batch.tokens.data[token_rows, positions].astype(np.int64)
        begins = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        slots = self._table.slots(token_rows, positions)
        sent = self._transfer(begins, seq_lens, positions, slots, ids)
        table = self._table.rows(rows, int(seq_lens.max()))
        plans = {
            window: self._draft.backend.plan(
                StepBatch(sent[0], sent[1], table, sent[3], query_lens, seq_lens, self._draft.block_size, window)
            )
            for window in dict.fromkeys(self._windows)
        }
        layer_plans = [plans[window] for window in self._windows]
        ids_there = sent[4] if tokens is None else tokens
        hidden: torch.Tensor = self._draft.model(
            ids_there, sent[2], self._draft.kv_caches, layer_plans, self._draft.backend
        )
        return hidden

    def move_row(self, source: int, target: int) -> None:
        self._tables.move_row(source, target)
        for column in (self._num_cached, self._drafts, self._num_drafts, self._drafted_from):
            column[target] = column[source]
        # The blocks are the target's now: who clears the source must not give them back.
        self._tables.clear_row(source)

    def clear_row(self, row: int) -> None:
        self._free += self._table.block_ids(row).tolist()
        self._tables.clear_row(row)
        self._num_cached[row] = self._num_drafts[row] = 0

    def check(self) -> None:
        """Raise AssertionError unless each block is free or one row's."""
        self._tables.check()
        rows = range(len(self._num_cached))
        held = [block for row in rows for block in self._table.block_ids(row).tolist()]
        assert sorted(held + self._free) == list(range(1, self._draft.num_blocks)), "a block is lost, or held twice"
