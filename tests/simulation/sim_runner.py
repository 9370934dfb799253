"""The real worker code of a step (rows, block tables, checks and sampler) around a model that knows the answers."""

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from fake_worker import Chunk, first_read
from side_parts import parts_of, with_rows
from sim_model import GRAMMAR_STEP, SlotModel, gap

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.wire.side_rows import LOGPROBS, PROMPT_LOGPROBS, find_rows
from quire.protocol.wire.worker_messages import ModelRunnerOutput, Proposed, SampleInputs, SchedulerOutput
from quire.worker_proc.attention.backend import StepBatch
from quire.worker_proc.attention.supports import Supports
from quire.worker_proc.execute import model_runner
from quire.worker_proc.execute.launched_step import LaunchedStep
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.models.model import Inputs, Outputs

UNLIKELY = -1e4


class Oracle:
    """Decoder, attention backend and proposer in one; it knows from the fake model what a step must compute.

    Attributes:
        chunks: handle → chunk to compute; None for a step that the fake model does not run.
        out_of_memory: the next forward pass raises MemoryError.
    """

    name, needs_host_lengths, supports = "oracle", True, Supports()
    config = SimpleNamespace(num_layers=0, pooling=None)
    build = SimpleNamespace(additions=None, routes=None)

    def __init__(self, vocab_size: int, sizes: list[int]) -> None:
        self._vocab_size, self._sizes = vocab_size, sizes
        self.model: SlotModel | None = None
        self.runner: ModelRunner | None = None
        self.chunks: dict[int, Chunk] | None = None
        self.out_of_memory = False
        self._batches: list[StepBatch] = []
        self._answers: dict[int, tuple[int, int]] = {}

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_dim)  # of zero pages, which nothing reads

    def attention_shape(self, layer: int) -> None:
        return None  # no layer has queries

    def plan(self, batch: StepBatch) -> None:
        self._batches.append(batch)

    def propose(self, wanted: dict[int, int]) -> dict[int, list[int]]:
        assert self.runner is not None
        handles = {row: int(self.runner.batch.handles[row]) for row in wanted}
        chunks = self.chunks or {}
        return {row: chunks[handle].drafts for row, handle in handles.items() if handle in chunks}

    def __call__(self, inputs: Inputs, *rest: Any) -> Outputs:
        """Return the token indices as hidden states: float32 ``[num_tokens, 1]``."""
        batches, self._batches, self._answers = self._batches, [], {}
        if self.out_of_memory:
            self.out_of_memory = False
            raise MemoryError
        if self.chunks is not None:
            self._compare(self.chunks, inputs.token_ids.tolist(), inputs.positions.tolist(), batches)
        return Outputs(torch.arange(len(inputs.token_ids), dtype=torch.float32)[:, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 ``[len(hidden), vocab]``: the right token, and a runner-up."""
        logits = torch.full((len(hidden), self._vocab_size), UNLIKELY)
        for row, place in enumerate(hidden[:, 0].long().tolist()):
            context, token = self._answers.get(place, (0, 0))
            logits[row, (token + GRAMMAR_STEP) % self._vocab_size] = -gap(context)
            logits[row, token] = 0.0
        return logits

    # ---- what the step must be

    def _compare(
        self, chunks: dict[int, Chunk], token_ids: list[int], positions: list[int], batches: list[StepBatch]
    ) -> None:
        """Raise AssertionError if the inputs differ from what the fake model would compute; store the right tokens."""
        assert self.runner is not None and self.model is not None
        batch = self.runner.batch
        rows = np.flatnonzero(batch.active[: batch.num_rows])
        active = [chunks[handle] for handle in batch.handles[rows].tolist()]
        assert len(active) == len(chunks), "other requests run than the step names"
        running = [
            chunk for chunk in active if chunk.end > chunk.start
        ]  # the others sample from logits of their parent
        assert [c.end - c.start for c in running] == batches[0].query_lens_cpu.tolist(), "chunk lengths differ"
        assert [c.end for c in running] == batches[0].seq_lens_cpu.tolist(), "sequence lengths differ"
        place = 0
        for index, chunk in enumerate(running):
            after = place + chunk.end - chunk.start
            known = chunk.start + chunk.num_known
            tokens = [*chunk.row.tokens[chunk.start : known], *chunk.drafts]
            assert positions[place:after] == list(range(chunk.start, chunk.end)), f"{chunk.row.request_id}: positions"
            assert token_ids[place:after] == tokens, f"{chunk.row.request_id}: tokens from {chunk.start} on"
            for group, own in enumerate(batches):
                self._compare_blocks(chunk, group, own.slot_mapping[place:after].tolist(), own.block_table[index])
            first = after - len(chunk.drafts) - 1
            self._answers.update(enumerate(self.model.answers(chunk), first))
            place = after
        assert place == len(token_ids), "tokens without a request"

    def _compare_blocks(self, chunk: Chunk, group: int, slots: list[int], table: torch.Tensor) -> None:
        assert self.model is not None
        size, held, name = self._sizes[group], chunk.row.tables[group], chunk.row.request_id
        want = [held[at // size] * size + at % size for at in range(chunk.start, chunk.end)]
        assert slots == want, f"{name}: slots of group {group}"
        first = first_read(self.model.groups[group], chunk.start) // size
        last = -(-chunk.end // size)
        assert table[first:last].tolist() == held[first:last], f"{name}: blocks of group {group}"


class RealRunner:
    """One rank's ModelRunner, run beside the fake model and compared with it after every step."""

    def __init__(self, config: EngineConfig, layout: KVLayout, num_blocks: int) -> None:
        self._oracle = oracle = Oracle(config.model.vocab_size, [g.block_size for g in layout.groups])
        proposer = oracle if config.num_speculative_tokens else None
        with mock.patch.object(model_runner, "make_proposer", lambda *args: proposer):
            double = cast(Any, oracle)
            self._runner = ModelRunner(config, layout, num_blocks, double, double, torch.device("cpu"))
        oracle.runner = self._runner
        self._launched: LaunchedStep | None = None
        self._handles: list[int] = []

    def begin_worker_epoch(self, model: SlotModel, last_step: int) -> None:
        self._oracle.model, self._oracle.out_of_memory, self._launched = model, False, None
        self._runner.begin_worker_epoch(last_step)

    def launch(self, step: SchedulerOutput, chunks: list[Chunk] | None, *, out_of_memory: bool = False) -> None:
        """``chunks``: None if the fake model does not run the step."""
        self._oracle.chunks = None if chunks is None else {chunk.row.handle: chunk for chunk in chunks}
        self._oracle.out_of_memory = out_of_memory
        self._launched = self._runner.launch(step)

    def proposed(self) -> Proposed:
        assert self._launched is not None
        return self._runner.proposed(self._launched)

    def finish(self, expected: ModelRunnerOutput | None, inputs: SampleInputs | None) -> ModelRunnerOutput:
        """Return the step's result after comparing it with ``expected``, the fake model's.

        Log probabilities of prompts are replaced by the fake model's, which the clients expect.
        """
        launched, self._launched = self._launched, None
        assert launched is not None
        result = self._runner.finish(launched, inputs).result()
        if result.handles is not None:
            self._handles = result.handles.tolist()
        if expected is None:
            return result
        return self._compare(launched, result, expected)

    def discard(self) -> None:
        if self._launched is not None:
            self._runner.discard(self._launched)
            self._launched = None

    def _compare(
        self, launched: LaunchedStep, result: ModelRunnerOutput, expected: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        model = self._oracle.model
        assert model is not None
        if expected.failure:
            assert result.failure and launched.void, "step did not run out of memory"
            return result
        real, fake = _by_handle(result, self._handles), _by_handle(expected, model._last_handles)
        assert real.keys() == fake.keys(), f"handles {sorted(real)} sampled, expected {sorted(fake)}"
        for handle, found in real.items():
            assert found[:2] == fake[handle][:2], f"handle {handle} got {found[:2]}, expected {fake[handle][:2]}"
            assert np.allclose(found[2], fake[handle][2], atol=1e-4), f"handle {handle}: log probabilities differ"
        assert not result.bad and not result.failed
        assert _parts(result) == _parts(expected), "parts of prompts with log probabilities differ"
        self._compare_rows(model)
        prompts = find_rows(expected.side, PROMPT_LOGPROBS)
        return with_rows(result, PROMPT_LOGPROBS, prompts)  # type: ignore[no-any-return]

    def _compare_rows(self, model: SlotModel) -> None:
        """Raise AssertionError unless both hold the same rows after the step (I6)."""
        runner = self._runner
        batch, tables = runner.batch, runner.tables.tables
        runner.check()
        assert batch.row_of.keys() == model.rows.keys(), "requests with rows differ"
        for handle, at in batch.row_of.items():
            row = model.rows[handle]
            known = int(batch.tokens.length[at])
            state = (bool(batch.active[at]), int(batch.num_computed[at]), int(batch.num_known[at]))
            assert state == (row.active, row.num_computed, len(row.tokens)), f"{row.request_id}: row is {state}"
            assert batch.tokens.data[at, :known].tolist() == row.tokens[:known], f"{row.request_id}: tokens differ"
            held = [table.block_ids(at).tolist() for table in tables]
            assert held == row.tables, f"{row.request_id}: blocks differ"
            if known < len(row.tokens):
                assert int(runner.last_sampled[at]) == row.tokens[-1], f"{row.request_id}: last token differs"


_Sampled = tuple[list[int], list[list[int]], list[list[float]]]


def _by_handle(result: ModelRunnerOutput, handles: list[int]) -> dict[int, _Sampled]:
    """Return handle → its tokens, and the ids and log probabilities of the most likely ones for each."""
    if result.tokens is None:
        return {}
    counts = [1] * len(handles) if result.counts is None else result.counts.tolist()
    owners = np.repeat(handles, counts).tolist()
    found: dict[int, _Sampled] = {handle: ([], [], []) for handle in handles}
    for owner, token in zip(owners, result.tokens.tolist(), strict=True):
        found[owner][0].append(token)
    for handle, _, (ids, _, values) in parts_of(result, LOGPROBS):
        found[handle][1].extend(ids.tolist())
        found[handle][2].extend(values.tolist())
    return found


def _parts(result: ModelRunnerOutput) -> list[tuple[int, int, int]]:
    return sorted((handle, start, len(rows[0])) for handle, start, rows in parts_of(result, PROMPT_LOGPROBS))
