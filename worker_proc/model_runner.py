"""One step: apply the diff, prepare inputs, run the model, sample, advance the rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import KVLayout
from quire.protocol.messages import Logprobs, ModelRunnerOutput, SchedulerOutput
from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.block_table import BlockTable, MultiGroupBlockTable
from quire.worker_proc.input_batch import Column, InputBatch, StepRefused
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.sampling.sampler import Sampled, Sampler

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """What the model is given: the rows that run and their tokens, flattened row by row.

    Attributes:
        rows: rows that run, ascending.
        query_lens: tokens of each of them.
        token_rows, positions: int64 ``[num_tokens]``.
        sampling: which of ``rows`` reach their last known position, as indices into ``rows``.
    """

    rows: Ints
    query_lens: npt.NDArray[np.int32]
    token_rows: Ints
    positions: Ints
    sampling: Ints

    @property
    def last_tokens(self) -> Ints:
        """Index, among the flattened tokens, of each row's last one."""
        return np.cumsum(self.query_lens, dtype=np.int64) - 1


NEVER_TOLD = np.full(1, -1, np.int32)
"""Row order that equals no other, so that the next result tells it: always after a request came or went."""


@dataclass(slots=True)
class PendingResult:
    """A step whose kernels are launched. On a CPU it is complete; on a GPU its tokens are on their way to the host."""

    step: int
    sampled: Sampled | None
    handles: npt.NDArray[np.int32] | None
    row_handles: npt.NDArray[np.int32]
    copied: "torch.cuda.Event | None"

    @property
    def ready(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def result(self) -> ModelRunnerOutput:
        """The message; waits for the device if it must."""
        if self.sampled is None:
            return ModelRunnerOutput(self.step, handles=self.handles)
        if self.copied is not None:
            self.copied.synchronize()
        sampled = self.sampled
        bad = self.row_handles[sampled.bad.cpu().numpy()].tolist() if bool(sampled.bad.any()) else []
        tokens = sampled.tokens.cpu().numpy().astype(np.int32)
        if sampled.logprobs is None:
            return ModelRunnerOutput(self.step, tokens, self.handles, bad=bad)
        logprobs = sampled.logprobs
        return ModelRunnerOutput(
            step=self.step,
            tokens=tokens,
            handles=self.handles,
            bad=bad,
            logprobs=Logprobs(logprobs.rows, logprobs.token_ids.shape[1]),
            logprob_token_ids=logprobs.token_ids.cpu().numpy().astype(np.int32).ravel(),
            logprob_values=logprobs.values.cpu().numpy().ravel(),
            logprob_ranks=logprobs.ranks.cpu().numpy().astype(np.int32),
        )


class ModelRunner:
    """Owns the rows, their block tables, the KV tensors and the model; knows of a request only what a diff told it."""

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_blocks: int,
        model: Decoder,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._model = model
        self._backend = backend
        self._num_blocks = num_blocks
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len)
        self.tables = MultiGroupBlockTable(
            [
                BlockTable(g.block_size, config.max_num_seqs, config.max_model_len, num_blocks, device)
                for g in layout.groups
            ]
        )
        self.batch.register(self.tables)
        # The newest sample of each row stays on the device: it is the next step's input.
        self.last_sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device)
        self.batch.register(Column(self.last_sampled))
        self.sampler = Sampler(self.batch)
        self._step = 0
        self._sampling_handles = NEVER_TOLD
        self._group_of_layer = [0] * len(model.layers)
        for index, group in enumerate(layout.groups):
            for layer in group.layers:
                self._group_of_layer[layer] = index
        self._kv_caches = [
            torch.zeros(
                backend.kv_cache_shape(
                    num_blocks, layout.groups[group].block_size, layout.num_kv_heads, layout.head_dim
                ),
                dtype=dtype,
                device=device,
            )
            for group in self._group_of_layer
        ]

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingResult:
        """Run one step.

        Raises:
            StepRefused: the diff does not fit what is held; the worker must not go on.
        """
        if step.step != self._step + 1:
            raise StepRefused(f"step {step.step} after step {self._step}")
        self._step = step.step
        self._apply(step)
        inputs = self._prepare(step)
        hidden = self._forward(inputs)
        sampled = self._sample(hidden, inputs)
        self._advance(inputs, sampled)
        return self._pending(inputs, sampled)

    # ---- apply the diff

    def _apply(self, step: SchedulerOutput) -> None:
        """In the protocol's order: removed and parked, new, unparked, appended, row moves, one batch update."""
        batch = self.batch
        for handle in step.parked:
            batch.active[batch.row(handle)] = False
        if step.removed or step.new_requests:
            self._sampling_handles = NEVER_TOLD
        rows = batch.change_rows(step.removed, step.new_requests, step.token_ids)
        self._add_blocks(step, rows)
        for handle in step.unparked:
            batch.active[batch.row(handle)] = True
        self._append_blocks(step)
        self.tables.commit()
        self.sampler.update_state(batch.builder.take(batch.num_rows))

    def _append_blocks(self, step: SchedulerOutput) -> None:
        """Blocks for held requests, a run of the same request and group at a time."""
        handles, ids = step.appended_handles, step.appended_block_ids
        if handles is None or ids is None:
            return
        groups = np.zeros_like(handles) if step.appended_groups is None else step.appended_groups
        if not len(handles) == len(ids) == len(groups):
            raise StepRefused("the appended blocks do not add up")
        cuts = np.flatnonzero((handles[1:] != handles[:-1]) | (groups[1:] != groups[:-1])) + 1
        for start, end in zip([0, *cuts], [*cuts, len(handles)], strict=True):
            self.tables.append_row(self.batch.row(int(handles[start])), int(groups[start]), ids[start:end])

    def _add_blocks(self, step: SchedulerOutput, rows: Sequence[int]) -> None:
        total = 0 if step.block_ids is None else len(step.block_ids)
        if total != sum(sum(n.num_blocks) for n in step.new_requests):
            raise StepRefused("the new requests' blocks do not add up")
        start = 0
        for request, row in zip(step.new_requests, rows, strict=True):
            assert step.block_ids is not None
            if len(request.num_blocks) != len(self.tables.tables):
                raise StepRefused(f"handle {request.handle} comes with blocks for {len(request.num_blocks)} groups")
            ends = start + np.cumsum(request.num_blocks)
            self.tables.add_row(row, np.split(step.block_ids[start : ends[-1]], ends[:-1] - start))
            start = int(ends[-1])

    # ---- prepare inputs

    def _prepare(self, step: SchedulerOutput) -> StepInputs:
        batch = self.batch
        counts = batch.active[: batch.num_rows].astype(np.int32)
        for handle, count in step.counts:
            row = batch.row(handle)
            if not counts[row] or count < 1:
                raise StepRefused(f"handle {handle} is parked, or is to compute {count} tokens")
            counts[row] = count
        rows = np.flatnonzero(counts)
        if not len(rows):
            raise StepRefused("nothing runs in this step")
        query_lens = counts[rows]
        computed, known = batch.num_computed[rows], batch.num_known[rows]
        if (computed + query_lens > known).any():
            raise StepRefused("a request is to compute tokens that nobody knows")
        starts = np.cumsum(query_lens) - query_lens
        token_rows = np.repeat(rows, query_lens)
        offsets = np.arange(len(token_rows)) - np.repeat(starts, query_lens)
        positions = np.repeat(computed, query_lens).astype(np.int64) + offsets
        sampling = np.flatnonzero(computed + query_lens == known)
        return StepInputs(rows, query_lens, token_rows, positions, sampling)

    def _token_ids(self, inputs: StepInputs) -> torch.Tensor:
        """Given tokens where there are any, else the row's last sample, which may only exist on the device."""
        tokens = self.batch.tokens
        given = inputs.positions < tokens.length[inputs.token_rows]
        ids = torch.from_numpy(tokens.data[inputs.token_rows, np.where(given, inputs.positions, 0)].astype(np.int64))
        ids = ids.to(self._device)
        if given.all():
            return ids
        sampled = np.flatnonzero(~given)
        ids[self._index(sampled)] = self.last_sampled[self._index(inputs.token_rows[sampled])]
        return ids

    def _step_batches(self, inputs: StepInputs) -> list[StepBatch]:
        """What attention needs, per KV group."""
        seq_lens = (self.batch.num_computed[inputs.rows] + inputs.query_lens).astype(np.int32)
        query_start_loc = np.zeros(len(inputs.rows) + 1, np.int32)
        np.cumsum(inputs.query_lens, out=query_start_loc[1:])
        start_loc = torch.from_numpy(query_start_loc).to(self._device)
        lens = torch.from_numpy(seq_lens).to(self._device)
        longest = int(seq_lens.max())
        return [
            StepBatch(
                query_start_loc=start_loc,
                seq_lens=lens,
                block_table=table.rows(inputs.rows, longest),
                slot_mapping=torch.from_numpy(table.slots(inputs.token_rows, inputs.positions)).to(self._device),
                query_lens_cpu=inputs.query_lens,
                seq_lens_cpu=seq_lens,
                block_size=table.block_size,
            )
            for table in self.tables.tables
        ]

    # ---- run, sample, advance

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        plans = [self._backend.plan(batch) for batch in self._step_batches(inputs)]
        positions = torch.from_numpy(inputs.positions).to(self._device)
        layer_plans = [plans[group] for group in self._group_of_layer]
        hidden: torch.Tensor = self._model(
            self._token_ids(inputs), positions, self._kv_caches, layer_plans, self._backend
        )
        return hidden

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> Sampled | None:
        if not len(inputs.sampling):
            return None
        last = inputs.last_tokens[inputs.sampling]
        if len(last) != len(hidden):
            hidden = hidden[self._index(last)]
        return self.sampler.sample(self._model.logits(hidden), inputs.rows[inputs.sampling])

    def _advance(self, inputs: StepInputs, sampled: Sampled | None) -> None:
        self.batch.num_computed[inputs.rows] += inputs.query_lens
        if sampled is not None:
            rows = inputs.rows[inputs.sampling]
            self.batch.num_known[rows] += 1
            self.last_sampled[self._index(rows)] = sampled.tokens

    def _pending(self, inputs: StepInputs, sampled: Sampled | None) -> PendingResult:
        handles = self.batch.handles[inputs.rows[inputs.sampling]]
        changed = not np.array_equal(handles, self._sampling_handles)
        self._sampling_handles = handles
        copied = None
        if self._device.type == "cuda" and sampled is not None:
            sampled.tokens = sampled.tokens.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return PendingResult(self._step, sampled, handles if changed else None, handles, copied)

    def _index(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def check(self) -> None:
        """Raise AssertionError unless rows are dense and every computed position has a block."""
        self.batch.check()
        for table in self.tables.tables:
            held = table.num_blocks_per_row[: self.batch.num_rows] * table.block_size
            assert (held >= self.batch.num_computed[: self.batch.num_rows]).all(), "computed beyond the blocks held"
