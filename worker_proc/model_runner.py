"""One step: apply the diff, prepare inputs, run the model, sample, advance the rows."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import KVLayout
from quire.protocol.messages import SchedulerOutput
from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.block_table import make_block_tables
from quire.worker_proc.decode_graphs import DecodeGraphs
from quire.worker_proc.decode_step import DecodeStep
from quire.worker_proc.input_batch import Column, InputBatch, StepRefused
from quire.worker_proc.kv_cache import allocate_kv_caches
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.pending_result import HostCopies, NothingSampled, PendingResult, SampledResult
from quire.worker_proc.sampling.sampler import Sampled, Sampler
from quire.worker_proc.steady_decode import SteadyDecode
from quire.worker_proc.step_inputs import Ints, StepInputs, prepare_inputs
from quire.worker_proc.transfer import Transfer

NEVER_TOLD = np.full(1, -1, np.int32)
"""Row order that equals no other, so that the next result tells it: always after a request came or went."""


_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
"""What torch's plain RuntimeError has in it when the host's memory is at its end."""


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
    ) -> None:
        """``layout``: of this rank."""
        self._device = device
        self._model = model
        self._backend = backend
        self._num_blocks = num_blocks
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len)
        self.tables = make_block_tables(
            layout.groups, num_blocks, config.max_model_len, self.batch.num_computed, device
        )
        self.batch.register(self.tables)
        # The newest sample of each row stays on the device: it is the next step's input.
        self.last_sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device)
        self.batch.register(Column(self.last_sampled))
        self.sampler = Sampler(self.batch)
        self._step = 0
        self._sampling_handles = NEVER_TOLD
        self._groups = layout.groups
        self._transfer = Transfer(device)
        self._copies = HostCopies(device)
        self._dropped: set[int] = set()
        group_of = {layer: index for index, group in enumerate(layout.groups) for layer in group.layers}
        sources = [model.config.cache_source(layer) for layer in range(model.config.num_layers)]
        self._group_of_layer = [group_of[source] for source in sources]
        caches = allocate_kv_caches(layout, num_blocks, layout.num_kv_heads, backend, device)
        self._kv_caches = [caches[source] for source in sources]
        self.steady = self._make_steady(config)

    def _make_steady(self, config: EngineConfig) -> SteadyDecode | None:
        """Where attention needs no lengths from the host, decode steps are the device's own affair."""
        if self._backend.needs_host_lengths:
            return None
        step = DecodeStep(
            self._model,
            self._backend,
            self.tables,
            self._groups,
            self._kv_caches,
            self._group_of_layer,
            self.last_sampled,
            self._transfer,
        )
        graphs = DecodeGraphs(step, eager=config.enforce_eager or self._device.type != "cuda")
        return SteadyDecode(
            graphs, self.batch, self.tables, self.sampler, self.last_sampled, self._transfer, self._copies
        )

    @torch.inference_mode()
    def warm_up(self, say: Callable[[str], None]) -> None:
        """Before the first step: capture graphs, if there are any."""
        if self.steady is not None:
            self.steady.graphs.capture(say)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> PendingResult:
        """Run one step.

        A step for which the device's memory does not suffice is a result too: it says so, all rows are gone, and
        further steps are answered with nothing until the scheduler has removed everyone that was held.

        Raises:
            StepRefused: the diff does not fit what is held; the worker must not go on.
        """
        if step.step != self._step + 1:
            raise StepRefused(f"step {step.step} after step {self._step}")
        self._step = step.step
        if self._dropped:
            self._dropped -= set(step.removed)
            if self._dropped:
                self._dropped |= {new.handle for new in step.new_requests}
                return NothingSampled(step.step)
            step = msgspec.structs.replace(step, removed=[])
        try:
            return self._run(step)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            return self._drop_everything(error)

    def _run(self, step: SchedulerOutput) -> PendingResult:
        self._apply(step)
        if self.steady is not None:
            if self.steady.takes(step):
                return self._pending(self.batch.handles[: self.batch.num_rows].copy(), self.steady.run())
            self.steady.leave()
        inputs = prepare_inputs(self.batch, step.counts)
        hidden = self._forward(inputs)
        sampled = self._sample(hidden, inputs)
        self._advance(inputs, sampled)
        return self._pending(self.batch.handles[inputs.rows[inputs.sampling]], sampled)

    def _drop_everything(self, error: BaseException) -> PendingResult:
        num_requests = int(self.batch.active[: self.batch.num_rows].sum())
        self._dropped = set(self.batch.row_of)
        self.batch.change_rows(list(self.batch.row_of), [], None)
        self.sampler.update_state(self.batch.builder.take(0))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        words = " ".join(str(error).split())[:300] or "the host's memory is at its end"
        return NothingSampled(self._step, failure=f"out of memory in a step of {num_requests} requests: {words}")

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
        """Blocks for held requests, all of a step at once."""
        handles, ids = step.appended_handles, step.appended_block_ids
        if handles is None or ids is None:
            return
        groups = np.zeros_like(handles) if step.appended_groups is None else step.appended_groups
        if not len(handles) == len(ids) == len(groups):
            raise StepRefused("the appended blocks do not add up")
        rows = np.array([self.batch.row(handle) for handle in handles.tolist()], np.int64)
        self.tables.append_rows(rows, groups, ids)

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

    def _to_device(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, list[StepBatch]]:
        """Token ids, positions, and what attention needs per KV group; one copy to the device."""
        tokens = self.batch.tokens
        given = inputs.positions < tokens.length[inputs.token_rows]
        ids = tokens.data[inputs.token_rows, np.where(given, inputs.positions, 0)].astype(np.int64)
        sampled = np.flatnonzero(~given)
        slots = [table.slots(inputs.token_rows, inputs.positions) for table in self.tables.tables]
        # Given tokens where there are any, else the row's last sample, which may only exist on the device.
        arrays = (inputs.query_start_loc, inputs.seq_lens, inputs.positions, ids, sampled, inputs.token_rows[sampled])
        starts, lens, positions, token_ids, places, rows, *group_slots = self._transfer(*arrays, *slots)
        if len(sampled):
            token_ids[places] = self.last_sampled[rows]
        longest = int(inputs.seq_lens.max())
        batches = [
            StepBatch(
                query_start_loc=starts,
                seq_lens=lens,
                block_table=table.rows(inputs.rows, longest),
                slot_mapping=own,
                query_lens_cpu=inputs.query_lens,
                seq_lens_cpu=inputs.seq_lens,
                block_size=table.block_size,
                window=group.sliding_window,
                chunk=group.chunk,
            )
            for table, group, own in zip(self.tables.tables, self._groups, group_slots, strict=True)
        ]
        return token_ids, positions, batches

    # ---- run, sample, advance

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        token_ids, positions, batches = self._to_device(inputs)
        plans = [self._backend.plan(batch) for batch in batches]
        layer_plans = [plans[group] for group in self._group_of_layer]
        hidden: torch.Tensor = self._model(token_ids, positions, self._kv_caches, layer_plans, self._backend)
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

    def _pending(self, row_handles: npt.NDArray[np.int32], sampled: Sampled | None) -> PendingResult:
        changed = not np.array_equal(row_handles, self._sampling_handles)
        self._sampling_handles = row_handles
        handles = row_handles if changed else None
        if sampled is None:
            return NothingSampled(self._step, handles)
        copy = self._copies.start(sampled.tokens, sampled.bad)
        return SampledResult(self._step, sampled, handles, row_handles, copy)

    def _index(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def check(self) -> None:
        """Raise AssertionError unless rows are dense and every computed position has a block."""
        self.batch.check()
        self.tables.check()
        for table in self.tables.tables:
            held = table.num_blocks_per_row[: self.batch.num_rows] * table.span
            assert (held >= self.batch.num_computed[: self.batch.num_rows]).all(), "computed beyond the blocks held"


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error)
