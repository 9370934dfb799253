"""The draft model proposer: a second, smaller model of the same vocabulary, with its own KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.batch.block_table import BlockTable
from quire.worker_proc.batch.group_tables import MultiGroupBlockTable
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.kv_cache import kernel_block_size
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.drafts.draft_sampling import DraftSampler
from quire.worker_proc.models.model import Inputs, Model


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model and the memory of its blocks.

    Attributes:
        kv_caches: one per layer. All layers share one block table per row, which covers all of the row's tokens.
        num_blocks: size of the block pool, including the null block.
    """

    model: Model
    backend: AttentionBackend
    kv_caches: list[torch.Tensor]
    block_size: int
    num_blocks: int


class DraftModelProposer:
    """Runs the draft model over a row's new tokens, then decodes drafts with it; a RowStore.

    Owns the draft model's blocks, and the number of tokens per row whose keys and values are valid. A row with more new
    tokens than a step allows catches up over several steps: all rows together compute at most ``max_step_tokens``
    tokens per step, those with the fewest missing tokens first. A row has no drafts until it has caught up, or while no
    block is free. So drafting never delays a step for long.

    Draft tokens are sampled like the request's tokens, with the same noise: two models with the same distribution
    choose the same token.
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
        max_rows, max_len = len(batch.tokens.data), batch.tokens.data.shape[1] - 1
        self._max_len = min(max_len, draft.model.config.max_position)
        kernels = kernel_block_size(draft.block_size, draft.backend)
        table = BlockTable(draft.block_size, max_rows, max_len, draft.num_blocks, device, kernel_block_size=kernels)
        self._transfer = Transfer(device)
        self._tables = MultiGroupBlockTable([table], transfer=self._transfer)
        self._table = table
        # The draft model has a pool of its own, and its blocks are never shared: drafts that were rejected leave no
        # trace in the prefix cache, and the scheduler need not know of them.
        self._free = list(range(1, draft.num_blocks))[::-1]
        self._num_cached = np.zeros(max_rows, np.int64)
        # The last drafts, and the row's length before them. The draft model has computed all of them but the last.
        self._drafts = np.zeros((max_rows, max_drafts), np.int64)
        self._num_drafts = np.zeros(max_rows, np.int64)
        self._drafted_from = np.zeros(max_rows, np.int64)
        config = draft.model.config
        sources = [config.cache_source(layer) for layer in range(config.num_layers)]
        self._reaches = [(config.window(source), config.chunk(source)) for source in sources]
        batch.register(self)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        self.sampler.start()
        rows, limits = self._allowed(wanted)
        if not len(rows):
            return {}
        self._count_confirmed(rows)
        rows, limits, counts = self._schedule(rows, limits)
        known = self._batch.tokens.length[rows].astype(np.int64)
        hidden = self._forward(rows, self._num_cached[rows], counts, None)
        self._num_cached[rows] += counts
        there = np.flatnonzero(self._num_cached[rows] == known)
        if not len(there):
            return {}
        (ends,) = self._transfer(np.cumsum(counts)[there] - 1)
        return self._decode(rows[there], limits[there], known[there], self._draft.model.logits(hidden[ends]))

    def _allowed(self, wanted: Mapping[int, int]) -> tuple[Ints, Ints]:
        """Return the rows, ascending, and each one's limit of drafts, by the draft model's length and free blocks."""
        rows = np.array(sorted(wanted), np.int64)
        limits = np.array([wanted[row] for row in rows.tolist()], np.int64)
        limits = np.minimum(limits, self._max_len - self._batch.tokens.length[rows])
        held = np.array([self._reserve(row, count) for row, count in zip(rows.tolist(), limits.tolist(), strict=True)])
        self._tables.commit()
        fits = (limits > 0) & held
        return rows[fits], limits[fits]

    def _reserve(self, row: int, num_drafts: int) -> bool:
        """Allocate blocks for a row's tokens and drafts; return False if there are not enough."""
        end = int(self._batch.tokens.length[row]) + num_drafts
        held = int(self._table.num_blocks_per_row[row]) // self._table.ratio
        lacking = -(-end // self._draft.block_size) - held
        if lacking > len(self._free):
            return False
        if lacking > 0:
            self._table.append_row(row, [self._free.pop() for _ in range(lacking)])
        return True

    def _count_confirmed(self, rows: Ints) -> None:
        """Count the keys and values of the last drafts as valid, as far as these drafts became the rows' tokens."""
        column = self._batch.tokens
        length = column.length[rows].astype(np.int64)
        step = np.arange(self._drafts.shape[1])
        at = self._drafted_from[rows][:, None] + step
        run = (step < self._num_drafts[rows][:, None] - 1) & (at < length[:, None] - 1)
        right = run & (self._drafts[rows] == column.data[rows[:, None], np.where(run, at, 0)])
        self._num_cached[rows] += np.minimum.accumulate(right, axis=1).sum(axis=1)
        self._num_drafts[rows] = 0

    def _schedule(self, rows: Ints, limits: Ints) -> tuple[Ints, Ints, Ints]:
        """Divide the step's token budget among the rows, those with the fewest missing tokens first.

        Returns:
            The rows that compute tokens, their limits of drafts, and their numbers of tokens.
        """
        lacking = self._batch.tokens.length[rows] - self._num_cached[rows]
        order = np.argsort(lacking, kind="stable")
        before = np.cumsum(lacking[order]) - lacking[order]
        counts = np.zeros(len(rows), np.int64)
        counts[order] = np.clip(self._max_step_tokens - before, 0, lacking[order])
        nonzero = counts > 0
        return rows[nonzero], limits[nonzero], counts[nonzero]

    def _decode(self, rows: Ints, limits: Ints, known: Ints, logits: torch.Tensor) -> dict[int, list[int]]:
        """Decode up to ``limits`` drafts per row. ``logits``: float32 ``[rows, vocab]``, of the first draft."""
        drafts = [(rows, self.sampler.sample(logits, rows, 0))]
        for step in range(1, int(limits.max())):
            active = np.flatnonzero(limits > step)
            tokens = drafts[-1][1]
            if len(active) < len(rows):
                tokens = tokens[self._transfer(active)[0]]
                rows, limits, known = rows[active], limits[active], known[active]
            hidden = self._forward(rows, known + step - 1, np.ones(len(rows), np.int64), tokens)
            drafts.append((rows, self.sampler.sample(self._draft.model.logits(hidden), rows, step)))
        return self._read_back(drafts)

    def _read_back(self, drafts: list[tuple[Ints, torch.Tensor]]) -> dict[int, list[int]]:
        """Copy the drafts of all decode steps to the host, and record them. Waits for the device."""
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
        """Run ``counts`` tokens of each row from position ``starts`` on; returns ``[num_tokens, hidden_size]``.

        Args:
            tokens: int64 ``[num_tokens]`` on the device, or None for the rows' tokens on the host.
        """
        positions = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        token_rows = np.repeat(rows, counts)
        query_lens, seq_lens = counts.astype(np.int32), (starts + counts).astype(np.int32)
        ids = np.zeros(0, np.int64)
        if tokens is None:
            ids = self._batch.tokens.data[token_rows, positions].astype(np.int64)
        starts_of_rows = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        slots = self._table.slots(token_rows, positions)
        self._transfer.collect()
        sent = self._transfer(starts_of_rows, seq_lens, positions, slots, ids)
        table = self._table.rows(rows, int(seq_lens.max()), self._transfer)
        plans = {
            reach: self._draft.backend.plan(
                StepBatch(
                    *(sent[0], sent[1], table, sent[3], query_lens, seq_lens, self._table.block_size, *reach),
                    layer_shapes=(self._draft.model.attention_shape(0),),
                    send=self._transfer,
                )
            )
            for reach in dict.fromkeys(self._reaches)
        }
        self._transfer.send()
        layer_plans = [plans[reach] for reach in self._reaches]
        inputs = Inputs(sent[4] if tokens is None else tokens, sent[2])
        return self._draft.model(inputs, self._draft.kv_caches, layer_plans, self._draft.backend).hidden

    def move_row(self, source: int, target: int) -> None:
        self._tables.move_row(source, target)
        for column in (self._num_cached, self._drafts, self._num_drafts, self._drafted_from):
            column[target] = column[source]
        # The blocks belong to the target now: clearing the source later must not free them.
        self._tables.clear_row(source)

    def clear_row(self, row: int) -> None:
        self._free += self._table.block_ids(row).tolist()
        self._tables.clear_row(row)
        self._num_cached[row] = self._num_drafts[row] = 0

    def check(self) -> None:
        """Raise AssertionError unless each block is either free or held by exactly one row."""
        self._tables.check()
        rows = range(len(self._num_cached))
        held = [block for row in rows for block in self._table.block_ids(row).tolist()]
        assert sorted(held + self._free) == list(range(1, self._draft.num_blocks)), "draft block leaked or duplicate"
