"""Execution of a step: apply the diff, prepare inputs, run the model, sample, and advance the rows."""

import time
from functools import partial
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.worker_messages import Proposed, SampleInputs, SchedulerOutput
from quire.worker_proc.adapters.rows import RowAdapters
from quire.worker_proc.adapters.sites import AdapterSites
from quire.worker_proc.adapters.slots import SlotMemory
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.batch.block_copies import BlockCopies
from quire.worker_proc.batch.diff_check import DiffCheck
from quire.worker_proc.batch.group_tables import make_block_tables
from quire.worker_proc.batch.input_batch import InputBatch, RowColumn, StepRefused
from quire.worker_proc.batch.kv_cache import allocate_kv_caches, group_caches, kernel_block_size
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.batch.step_inputs import StepInputs, prepare_inputs
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.drafts.draft_model import DraftModel
from quire.worker_proc.drafts.make import make_proposer, make_rejection
from quire.worker_proc.execute.device_inputs import InputSender
from quire.worker_proc.execute.forward import Forward
from quire.worker_proc.execute.forward_passes import ForwardPasses
from quire.worker_proc.execute.launched_step import LaunchedStep
from quire.worker_proc.execute.pending_result import (
    DeviceTimer,
    HostCopies,
    HostCopy,
    NothingSampled,
    PendingResult,
    SampledResult,
    result_tensors,
)
from quire.worker_proc.execute.routed_experts import RoutedExpertTable
from quire.worker_proc.execute.steady_decode import SteadyLauncher
from quire.worker_proc.execute.step_extras import NO_EXTRAS, ExtraReader
from quire.worker_proc.execute.token_history import TokenHistory
from quire.worker_proc.images.rows import RowItems
from quire.worker_proc.models.model import Model
from quire.worker_proc.pooling.check import PoolingCheck
from quire.worker_proc.sampling.accept import Accepted, accept_drafts
from quire.worker_proc.sampling.sampler import SampledTokens, Sampler
from quire.worker_proc.sampling.token_masks import TokenMasks
from quire.worker_proc.states.rows import RowStates

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
        model: Model,
        backend: AttentionBackend,
        device: torch.device,
        draft: DraftModel | None = None,
        num_slots: int = 0,
    ) -> None:
        """
        Args:
            layout: this rank's KV layout.
            num_slots: size of the pool of recurrent states, slot 0 included; 0 for a model without them.
            draft: the draft model, if the proposer uses one.
        """
        self._device, self.kv_layout, self.num_blocks = device, layout, num_blocks
        self._transfer = Transfer(device)
        self._model = model
        self.batch = InputBatch(
            config.max_num_seqs, config.max_model_len, lambda params: self.sampler.reads_output(params)
        )
        self.tables = make_block_tables(
            layout.groups,
            num_blocks,
            config.max_model_len,
            self.batch.num_computed,
            device,
            [kernel_block_size(group.block_size, backend) for group in layout.groups],
            self._transfer,
        )
        self.batch.register(self.tables)
        sites, row_adapters = model.build.additions, RowAdapters(self.batch)
        self.adapters = SlotMemory(sites, self._transfer, row_adapters) if isinstance(sites, AdapterSites) else None
        self.states = RowStates(config, layout, num_slots, self.batch, self._transfer, device)
        self.items = RowItems(config, self.batch, self._transfer)
        checks = PoolingCheck(self.batch, config.model), row_adapters, self.states, self.items
        self._diffs = DiffCheck(self.batch, self.tables, config, checks)
        # The newest sampled token of each row stays on the device: it is the next step's input.
        self.last_sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=device)
        self.batch.register(RowColumn(self.last_sampled))
        self.sampler = Sampler(self.batch, config, device, transfer=self._transfer)
        self.history = TokenHistory(self.batch)
        self._proposer = make_proposer(config, self.batch, device, draft)
        self._rejection = make_rejection(config, self.batch, self._proposer)
        self._clock = DeviceTimer()
        self._step = 0
        self._sampling_handles = HANDLES_UNSENT
        self._copies = HostCopies(device)
        self._dropped: set[int] = set()
        self.kv_caches = caches = allocate_kv_caches(layout, num_blocks, backend, device)
        routes, tables = model.build.routes, self.tables.tables
        self._experts = None
        if routes is not None:
            self._experts = RoutedExpertTable(routes, layout, num_blocks, self.batch, tables, self._transfer, device)
        self._extras = ExtraReader(model, self.batch, self._transfer, self._experts)
        by_slot = None if self._experts is None else self._experts.values
        tensors = chain.from_iterable(group_caches(layout, caches, num_blocks))
        self._block_copies = BlockCopies(tensors, num_blocks, by_slot)
        self.forward = Forward.of(model, backend, self.tables, layout.groups, caches, self._experts)
        self.passes = ForwardPasses(self.forward, eager=config.enforce_eager)
        shapes = self.forward.shapes()
        self._inputs = InputSender(
            self.batch,
            self.tables,
            layout.groups,
            shapes,
            self.last_sampled,
            self._transfer,
            self._extras.batch_fields,
            self.states,
            self.items,
        )
        self.steady = None
        if not backend.needs_host_lengths and config.model.generates and not layout.states:
            self.steady = SteadyLauncher.make(
                config, self.forward, self.batch, self.last_sampled, self._transfer, self._copies
            )

    @torch.inference_mode()
    def warm_up(self, *, largest_only: bool = False) -> None:
        """Capture CUDA graphs, if any, before the first step."""
        if self.steady is not None:
            self.steady.graphs.capture(largest_only=largest_only)

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
        # Numbers have no gap, so a step that was lost or repeated is noticed before it touches a row.
        if step.step != self._step + 1:
            raise StepRefused(f"step {step.step} after step {self._step}")
        nothing = SampledPositions.one_per_row(np.zeros(0, np.int64))
        if self._dropped:
            self._dropped -= set(step.removed)
            if self._dropped:
                self._step = step.step
                # Steps that were sent before the scheduler knew of the failure refer to rows that are gone. They are
                # answered and not computed.
                self._dropped |= {new.handle for new in step.new_requests}
                return LaunchedStep(step.step, began, nothing, void=True)
            step = msgspec.structs.replace(step, removed=[])
        # The whole diff is checked before any of it is applied: there is no way back from half of a diff, and the ranks
        # would differ.
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
        self._transfer.collect()
        # All small arrays of the step are collected and sent in one copy. Each copy alone would cost more than its
        # bytes do.
        self._apply(step)
        if self.steady is not None:
            if self.steady.enter(step):
                return self._launch_steady(step, began)
            self.steady.leave()
        proposals = None
        if step.drafts and self._proposer is not None:
            self.history.catch_up()
            wanted = {self.batch.row(handle): count for handle, count in step.drafts}
            # Proposers read the tokens of the previous step, so the host waits for the device here. It is the price of
            # drafts: steps with them do not overlap.
            proposals = self._proposer.propose(wanted)
        inputs = prepare_inputs(self.batch, step, proposals)
        if self.adapters is not None:
            self.adapters.begin_step(inputs.rows, inputs.query_lens)
        if self.steady is not None and self.steady.graphs.takes(inputs):
            return self._launch_verify(step, began, inputs)
        sent, positions = self._inputs.of(inputs), inputs.sampled
        plans = [self.forward.backend.plan(batch) for batch in sent.batches]
        self._prepare_sampling(positions)
        extras = self._extras.targets(inputs)
        self._transfer.send()
        hidden, logits = self.passes.run(sent, plans, sampling=len(positions) > 0)
        return LaunchedStep(step.step, began, positions, inputs, sent.sampled_rows, logits, extras=extras.read(hidden))

    def _launch_steady(self, step: SchedulerOutput, began: float) -> LaunchedStep:
        assert self.steady is not None
        positions = SampledPositions.one_per_row(np.arange(self.batch.num_rows))
        sampling = not step.awaits_sample_inputs and self.sampler.is_plain(positions.rows)
        if not sampling:
            self._prepare_sampling(positions)
        if self.adapters is not None:
            self.adapters.begin_step(positions.rows, 1)
        extras = self._extras.of_decode(None)
        self._transfer.send()
        output = self.steady.launch(sampling=sampling)
        sampled, logits = (output, None) if isinstance(output, SampledTokens) else (None, output)
        return LaunchedStep(step.step, began, positions, None, None, logits, sampled, steady=True, extras=extras)

    def _launch_verify(self, step: SchedulerOutput, began: float, inputs: StepInputs) -> LaunchedStep:
        """Launch a step in which every row decodes, with draft tokens."""
        assert self.steady is not None
        graphs, positions = self.steady.graphs, inputs.sampled
        rows = graphs.store(inputs)
        extras = self._extras.of_decode(inputs)
        self._prepare_sampling(positions)
        self._transfer.send()
        logits = graphs.run_verify(len(inputs.rows), len(positions))
        return LaunchedStep(step.step, began, positions, inputs, rows, logits, extras=extras)

    def _prepare_sampling(self, positions: SampledPositions) -> None:
        """Send what sampling needs with the step's copy, unless it depends on tokens that are not on the host yet."""
        if len(positions) and not self.sampler.needs_history:
            self.sampler.prepare(positions)

    def _finish(self, launched: LaunchedStep, inputs: SampleInputs | None) -> PendingResult:
        positions, sampled = launched.positions, launched.sampled
        masks = None if inputs is None else TokenMasks.of(inputs, self.batch, positions)
        if launched.logits is not None:
            if self.sampler.needs_history:
                self.history.catch_up()
                self._transfer.collect()
                self.sampler.prepare(positions)
                self._transfer.send()
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
        """Apply the diff in the order of the protocol (``SchedulerOutput``)."""
        batch = self.batch
        for handle in step.parked:
            batch.active[batch.row(handle)] = False
        if step.removed or step.new_requests:
            self._sampling_handles = HANDLES_UNSENT
        # Removed before added, and by row moves: a new request takes the row of a removed one, so that the batch stays
        # without gaps and most rows stay where they are.
        rows = batch.change_rows(step.removed, step.new_requests, step.token_ids)
        self.tables.add_new(step, rows)
        batch.active[[batch.row(handle) for handle in step.unparked]] = True
        # After the rows have moved, since it names requests by handle; before their blocks grow, since a beam's block
        # belongs to the token that was chosen.
        self.history.replace_last(step.chosen)
        self.tables.append_to_held(step, batch.row)
        self.tables.commit()
        # Before the forward pass: the source may be written by its owner in this very step.
        self._block_copies.run(step.block_copies)
        self.states.apply(step, rows)
        # Last, with all moves of the step: plugins see one update, in the form that the interface of logits processors
        # asks for.
        self.sampler.update_state(batch.builder.get_and_reset(batch.num_rows))

    # ---- advance

    def _advance(self, launched: LaunchedStep, sampled: SampledTokens | None) -> PendingResult:
        """Advance the rows by their computed and accepted tokens."""
        batch, inputs, positions = self.batch, launched.inputs, launched.positions
        rows = positions.rows
        if inputs is not None:
            batch.num_computed[inputs.rows] += inputs.query_lens
        else:
            batch.num_computed[rows] += 1
        tensors = result_tensors(sampled, launched.extras)
        if sampled is None:
            handles = self._changed_handles(batch.handles[rows].copy())
            copy = self._copies.start(tensors) if tensors else None
            launched.extras.advance()
            return NothingSampled(launched.step, handles, launched.extras, copy)
        if launched.sampled_rows is not None and not positions.any_drafts:
            self.last_sampled[launched.sampled_rows] = sampled.tokens
        in_graph = launched.sampled is not None and launched.extras is NO_EXTRAS
        whole = self.steady.graphs.step.output if self.steady is not None and in_graph else None
        copy = self._copies.start(tensors, whole)
        if positions.any_drafts:
            return self._advance_by_drafts(launched, sampled, copy)
        self.history.sampled(rows, copy)
        batch.num_known[rows] += 1
        return self._result(launched, sampled, rows, copy, None)

    def _advance_by_drafts(self, launched: LaunchedStep, sampled: SampledTokens, copy: HostCopy) -> PendingResult:
        """Advance rows with draft tokens; waits for the device, because the next step needs the accepted counts."""
        batch, positions = self.batch, launched.positions
        tokens = copy.arrays()[0][: len(positions)]
        accepted = accept_drafts(tokens, positions)
        rows = positions.rows[positions.offsets == 0]
        batch.num_computed[rows] -= accepted.drafts - (accepted.counts - 1)
        batch.num_known[rows] += accepted.counts
        self.states.accept(rows, accepted.counts.astype(np.int64))
        own = np.split(tokens[accepted.kept], np.cumsum(accepted.counts)[:-1])
        for row, new in zip(rows.tolist(), own, strict=True):
            self.history.extend(row, new.tolist())
        return self._result(launched, sampled, rows, copy, accepted)

    def _result(
        self, launched: LaunchedStep, sampled: SampledTokens, rows: Ints, copy: HostCopy, accepted: Accepted | None
    ) -> SampledResult:
        self.sampler.accepted(launched.positions, sampled.tokens, accepted)
        row_handles = self.batch.handles[rows].copy()
        sent, end = self._changed_handles(row_handles), partial(self._clock.end, launched.began)
        launched.extras.advance()
        return SampledResult(launched.step, sampled, sent, row_handles, copy, end, accepted, launched.extras)

    def _changed_handles(self, row_handles: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Return ``row_handles`` if they differ from those of the previous result, or None."""
        changed = not np.array_equal(row_handles, self._sampling_handles)
        self._sampling_handles = row_handles
        return row_handles if changed else None

    def check(self) -> None:
        """Raise AssertionError unless rows and tables are consistent and every computed position has a block."""
        self.batch.check()
        self.tables.check()
        self.states.check()
        for table in self.tables.tables:
            held = table.num_blocks_per_row[: self.batch.num_rows] * table.block_size
            assert (held >= self.batch.num_computed[: self.batch.num_rows]).all(), "a computed position has no block"


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error)
