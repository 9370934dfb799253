"""Execution of a step: apply the diff, prepare inputs, run the model, sample, and advance the rows."""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.worker_messages import Proposed, SampleInputs, SchedulerOutput
from quire.worker_proc.attention.backend import AttentionBackend, StepBatch
from quire.worker_proc.batch.diff_check import DiffCheck
from quire.worker_proc.batch.group_tables import make_block_tables
from quire.worker_proc.batch.input_batch import Column, InputBatch, StepRefused
from quire.worker_proc.batch.kv_cache import allocate_kv_caches
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.batch.step_inputs import StepInputs, prepare_inputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.drafts.draft_model import DraftModel
from quire.worker_proc.drafts.make import make_proposer, make_rejection
from quire.worker_proc.execute.decode_graphs import DecodeGraphs
from quire.worker_proc.execute.decode_step import DecodeStep
from quire.worker_proc.execute.launched_step import LaunchedStep
from quire.worker_proc.execute.pending_result import (
    HostCopies,
    HostCopy,
    NothingSampled,
    PendingResult,
    SampledResult,
    StepClock,
)
from quire.worker_proc.execute.steady_decode import SteadyDecode
from quire.worker_proc.execute.token_history import TokenHistory
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.sampling.accept import Accepted, accept_drafts
from quire.worker_proc.sampling.processors import output_readers
from quire.worker_proc.sampling.prompt_logprobs import prompt_logprobs
from quire.worker_proc.sampling.sampler import Sampled, Sampler
from quire.worker_proc.sampling.token_masks import TokenMasks

HANDLES_UNSENT = np.full(1, -1, np.int32)
"""Handles that equal no others, so that the next result includes them; set after a request is added or removed."""

_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
"""Part of the message of torch's RuntimeError when host memory is exhausted."""


class ModelRunner:
    """Owns the rows, their block tables, the KV tensors and the model; all it has about a request is from diffs."""

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_blocks: int,
        model: Decoder,
        backend: AttentionBackend,
        device: torch.device,
        draft: DraftModel | None = None,
    ) -> None:
        """
        Args:
            layout: this rank's KV layout.
            draft: the draft model, if the proposer uses one.
        """
        self._device = device
        self._model = model
        self._backend = backend
        self.batch = InputBatch(config.max_num_seqs, config.max_model_len, output_readers(config))
        self.tables = make_block_tables(
            layout.groups, num_blocks, config.max_model_len, self.batch.num_computed, device
        )
        self.batch.register(self.tables)
        self._diffs = DiffCheck(self.batch, self.tables, config)
        # The newest sampled token of each row stays on the device: it is the next step's input.
        self.last_sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device)
        self.batch.register(Column(self.last_sampled))
        self.sampler = Sampler(self.batch, config, device)
        self.history = TokenHistory(self.batch)
        self._proposer = make_proposer(config, self.batch, device, draft)
        self._rejection = make_rejection(config, self.batch, self._proposer)
        self._clock = StepClock()
        self._step = 0
        self._sampling_handles = HANDLES_UNSENT
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
        """Make the runner of steady decode steps, or return None if attention needs lengths on the host."""
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
        return SteadyDecode(graphs, self.batch, self.tables, self.last_sampled, self._transfer, self._copies)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture CUDA graphs, if any, before the first step."""
        if self.steady is not None:
            self.steady.graphs.capture()

    def execute(self, step: SchedulerOutput, inputs: SampleInputs | None = None) -> PendingResult:
        """Run one step: ``launch`` and ``finish``."""
        return self.finish(self.launch(step), inputs)

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Run one step up to its sampling. Does not wait for the previous step, unless draft tokens must be proposed.

        If the device is out of memory, the result reports it and all rows are dropped. Further steps are void until the
        scheduler has removed every request that was held.

        Raises:
            StepRefused: the diff does not fit the worker's state; no part of it was applied, and the worker must stop.
        """
        began = time.perf_counter()
        if step.step != self._step + 1:
            raise StepRefused(f"step {step.step} after step {self._step}")
        nothing = SampledPositions.one_per_row(np.zeros(0, np.int64))
        if self._dropped:
            self._dropped -= set(step.removed)
            if self._dropped:
                self._step = step.step
                self._dropped |= {new.handle for new in step.new_requests}
                return LaunchedStep(step.step, began, nothing, void=True)
            step = msgspec.structs.replace(step, removed=[])
        self._diffs.require(step)
        self._step = step.step
        try:
            return self._launch(step, began)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            return LaunchedStep(step.step, began, nothing, failure=self._drop_everything(error), void=True)

    @torch.inference_mode()
    def finish(self, launched: LaunchedStep, inputs: SampleInputs | None = None) -> PendingResult:
        """Sample the newest launched step and advance the rows.

        Args:
            inputs: sample inputs of a step with ``awaits_sample_inputs``.

        Raises:
            StepRefused: ``inputs`` do not match the sampled positions; the worker must stop.
        """
        if launched.void:
            return NothingSampled(launched.step, failure=launched.failure)
        try:
            return self._finish(launched, inputs)
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            return NothingSampled(launched.step, failure=self._drop_everything(error))

    def discard(self, launched: LaunchedStep) -> PendingResult:
        """End the newest launched step without sampling; its rows stay unchanged until they are removed."""
        return NothingSampled(launched.step)

    def proposed(self, launched: LaunchedStep) -> Proposed:
        """Return the draft tokens of a launched step, from which the scheduler makes masks; may be empty."""
        inputs = launched.inputs
        drafts = [] if inputs is None or inputs.drafts is None else inputs.drafts
        rows = launched.positions.rows[launched.positions.offsets == 0]
        drafting = [index for index, own in enumerate(drafts) if own]
        return Proposed(
            launched.step,
            self.batch.handles[rows[drafting]],
            np.array([len(drafts[index]) for index in drafting], np.int32),
            np.array([draft for index in drafting for draft in drafts[index]], np.int32),
        )

    def _launch(self, step: SchedulerOutput, began: float) -> LaunchedStep:
        self._apply(step)
        if self.steady is not None:
            if self.steady.enter(step):
                positions = SampledPositions.one_per_row(np.arange(self.batch.num_rows))
                sampling = not step.awaits_sample_inputs and self.sampler.is_plain(positions.rows)
                output = self.steady.launch(sampling=sampling)
                sampled, logits = (output, None) if isinstance(output, Sampled) else (None, output)
                return LaunchedStep(step.step, began, positions, None, logits, sampled, steady=True)
            self.steady.leave()
        proposals = None
        if step.drafts and self._proposer is not None:
            self.history.catch_up()
            wanted = {self.batch.row(handle): count for handle, count in step.drafts}
            proposals = self._proposer.propose(wanted)
        inputs = prepare_inputs(self.batch, step, proposals)
        hidden = self._forward(inputs)
        logits = None
        if len(inputs.sampling):
            places = inputs.sampled_tokens
            logits = self._model.logits(hidden if len(places) == len(hidden) else hidden[self._index(places)])
        prompt_rows = prompt_logprobs(self._model, hidden, inputs, self.batch)
        return LaunchedStep(step.step, began, inputs.sampled, inputs, logits, prompt_rows=prompt_rows)

    def _finish(self, launched: LaunchedStep, inputs: SampleInputs | None) -> PendingResult:
        positions, sampled = launched.positions, launched.sampled
        masks = None if inputs is None else TokenMasks.of(inputs, self.batch, positions)
        if launched.logits is not None:
            if self.sampler.needs_history:
                self.history.catch_up()
            choose = None if self._rejection is None else self._rejection.chooser(positions)
            sampled = self.sampler.sample(launched.logits, positions, masks, choose)
        if sampled is not None and launched.steady and launched.sampled is None:
            assert self.steady is not None
            self.steady.graphs.step.advance(sampled.tokens)
        return self._advance(launched, sampled)

    @torch.inference_mode()
    def begin_worker_epoch(self, last_step: int) -> None:
        """Drop all rows; the next step must be the one after ``last_step``."""
        self._clear_rows()
        self._dropped.clear()
        self._step = last_step

    def _clear_rows(self) -> None:
        self.batch.builder.reset()
        self.batch.change_rows(list(self.batch.row_of), [], None)
        self.batch.builder.reset()
        self.history.clear()
        self.sampler.reset()
        self._sampling_handles = HANDLES_UNSENT
        if self.steady is not None:
            self.steady.leave()

    def _drop_everything(self, error: BaseException) -> str:
        """Drop all rows after running out of memory; return the message for the scheduler."""
        num_requests = int(self.batch.active[: self.batch.num_rows].sum())
        self._dropped = set(self.batch.row_of)
        self._clear_rows()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        reason = " ".join(str(error).split())[:300] or "host memory is exhausted"
        return f"out of memory in a step of {num_requests} requests: {reason}"

    # ---- apply the diff

    def _apply(self, step: SchedulerOutput) -> None:
        """Apply the diff in the protocol's order: removed and parked, new, unparked, appended, moves, batch update."""
        batch = self.batch
        for handle in step.parked:
            batch.active[batch.row(handle)] = False
        if step.removed or step.new_requests:
            self._sampling_handles = HANDLES_UNSENT
        rows = batch.change_rows(step.removed, step.new_requests, step.token_ids)
        self._add_blocks(step, rows)
        for handle in step.unparked:
            batch.active[batch.row(handle)] = True
        self._append_blocks(step)
        self.tables.commit()
        self.sampler.update_state(batch.builder.get_and_reset(batch.num_rows))

    def _append_blocks(self, step: SchedulerOutput) -> None:
        """Append blocks to the rows of held requests, all of a step at once."""
        handles, ids = step.appended_handles, step.appended_block_ids
        if handles is None or ids is None:
            return
        groups = np.zeros_like(handles) if step.appended_groups is None else step.appended_groups
        rows = np.array([self.batch.row(handle) for handle in handles.tolist()], np.int64)
        self.tables.append_rows(rows, groups, ids)

    def _add_blocks(self, step: SchedulerOutput, rows: Sequence[int]) -> None:
        start = 0
        for request, row in zip(step.new_requests, rows, strict=True):
            assert step.block_ids is not None
            ends = start + np.cumsum(request.num_blocks)
            self.tables.add_row(row, np.split(step.block_ids[start : ends[-1]], ends[:-1] - start))
            start = int(ends[-1])

    # ---- prepare inputs

    def _to_device(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, list[StepBatch]]:
        """Return token ids, positions, and attention's inputs per KV group, sent in one copy to the device."""
        tokens = self.batch.tokens
        on_host = inputs.positions < tokens.length[inputs.token_rows]
        if inputs.drafts is not None:
            on_host[:] = True  # draft tokens are stored after the known tokens, all of which the host has
        ids = tokens.data[inputs.token_rows, np.where(on_host, inputs.positions, 0)].astype(np.int64)
        sampled = np.flatnonzero(~on_host)
        slots = [table.slots(inputs.token_rows, inputs.positions) for table in self.tables.tables]
        # A token that the host does not have is the row's last sampled one, which may exist only on the device.
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
            )
            for table, group, own in zip(self.tables.tables, self._groups, group_slots, strict=True)
        ]
        return token_ids, positions, batches

    # ---- run, advance

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        token_ids, positions, batches = self._to_device(inputs)
        plans = [self._backend.plan(batch) for batch in batches]
        layer_plans = [plans[group] for group in self._group_of_layer]
        hidden: torch.Tensor = self._model(token_ids, positions, self._kv_caches, layer_plans, self._backend)
        return hidden

    def _advance(self, launched: LaunchedStep, sampled: Sampled | None) -> PendingResult:
        """Advance the rows by their computed and accepted tokens."""
        batch, inputs, positions = self.batch, launched.inputs, launched.positions
        rows = positions.rows
        if inputs is not None:
            batch.num_computed[inputs.rows] += inputs.query_lens
        else:
            batch.num_computed[rows] += 1
        if sampled is None:
            handles = self._changed_handles(batch.handles[rows].copy())
            return NothingSampled(launched.step, handles, launched.prompt_rows)
        if positions.any_drafts:
            return self._advance_by_drafts(launched, sampled)
        if inputs is not None:
            self.last_sampled[self._index(rows)] = sampled.tokens
        copy = self._copies.start(sampled.tokens, sampled.bad)
        self.history.sampled(rows, copy)
        batch.num_known[rows] += 1
        return self._result(launched, sampled, rows, copy, None)

    def _advance_by_drafts(self, launched: LaunchedStep, sampled: Sampled) -> PendingResult:
        """Advance rows with draft tokens; waits for the device, because the next step needs the accepted counts."""
        batch, positions = self.batch, launched.positions
        copy = self._copies.start(sampled.tokens, sampled.bad)
        tokens = copy.arrays()[0][: len(positions)]
        accepted = accept_drafts(tokens, positions)
        rows = positions.rows[positions.offsets == 0]
        batch.num_computed[rows] -= accepted.drafts - (accepted.counts - 1)
        batch.num_known[rows] += accepted.counts
        own = np.split(tokens[accepted.kept], np.cumsum(accepted.counts)[:-1])
        for row, new in zip(rows.tolist(), own, strict=True):
            self.history.extend(row, new.tolist())
        last = accepted.kept[np.cumsum(accepted.counts) - 1]
        self.last_sampled[self._index(rows)] = sampled.tokens[self._index(last)]
        return self._result(launched, sampled, rows, copy, accepted)

    def _result(
        self, launched: LaunchedStep, sampled: Sampled, rows: Ints, copy: HostCopy, accepted: Accepted | None
    ) -> SampledResult:
        self.sampler.accepted(launched.positions, sampled.tokens, accepted)
        row_handles = self.batch.handles[rows].copy()
        sent, end = self._changed_handles(row_handles), partial(self._clock.end, launched.began)
        return SampledResult(launched.step, sampled, sent, row_handles, copy, end, accepted, launched.prompt_rows)

    def _changed_handles(self, row_handles: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Return ``row_handles`` if they differ from those of the previous result, or None."""
        changed = not np.array_equal(row_handles, self._sampling_handles)
        self._sampling_handles = row_handles
        return row_handles if changed else None

    def _index(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def check(self) -> None:
        """Raise AssertionError unless rows and tables are consistent and every computed position has a block."""
        self.batch.check()
        self.tables.check()
        for table in self.tables.tables:
            held = table.num_blocks_per_row[: self.batch.num_rows] * table.block_size
            assert (held >= self.batch.num_computed[: self.batch.num_rows]).all(), "a computed position has no block"


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error)
