"""The container of logits processors over a real batch, without a model: a test provides logits and samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from processor_cases import Request, processor_config
from sampling_batch import CPU

from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import InputBatch
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.execute.token_history import TokenHistory
from quire.worker_proc.sampling.accept import accept_drafts
from quire.worker_proc.sampling.processors import Failures, LogitsProcessors
from quire.worker_proc.sampling.token_masks import TokenMasks


class ProcessorsUnderTest:
    """``requests``: handle → the current state of the request, computed by the test's own arithmetic."""

    def __init__(self, plugins: Sequence[str] = (), max_rows: int = 8, **settings: Any) -> None:
        names = [f"processor_plugins:{name}" for name in plugins]
        config = processor_config(logits_processors=names, **settings)
        self.batch = InputBatch(max_rows, 512, lambda params: self.processors.reads_output(params))
        self.processors = LogitsProcessors(config, self.batch, CPU)
        self.history = TokenHistory(self.batch)
        self.requests: dict[int, Request] = {}

    def change(self, removed: Sequence[int], new: dict[int, Request]) -> None:
        data = [
            NewRequestData(handle, f"r{handle}", len(r.prompt), len(r.prompt + r.output), 0, [1], r.params, handle)
            for handle, r in new.items()
        ]
        tokens = [token for r in new.values() for token in r.prompt + r.output]
        self.batch.change_rows(removed, data, np.array(tokens, np.int32))
        for handle in removed:
            del self.requests[handle]
        for handle, r in new.items():
            self.requests[handle] = Request(r.params, list(r.prompt), list(r.output))
        self.processors.update_state(self.batch.builder.get_and_reset(self.batch.num_rows))

    def add(self, *requests: Request) -> None:
        first = max(self.requests, default=-1) + 1
        self.change([], dict(enumerate(requests, start=first)))

    def request_in(self, row: int) -> Request:
        return self.requests[int(self.batch.handles[row])]

    @property
    def everyone(self) -> SampledPositions:
        return SampledPositions.one_per_row(np.arange(self.batch.num_rows))

    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, str]]:
        """Return one position per row."""
        edited = logits.clone()
        return edited, dict(self.edit(edited, self.everyone, None))

    def edit(self, logits: torch.Tensor, positions: SampledPositions, masks: TokenMasks | None) -> Failures:
        """Edit ``logits`` in place."""
        self.processors.prepare(positions)
        return self.processors.apply(logits, positions, masks)

    def sampled(self, positions: SampledPositions, tokens: list[int]) -> None:
        """End a step: rows with drafts keep the correct ones."""
        accepted = accept_drafts(np.array(tokens), positions) if positions.any_drafts else None
        kept = range(len(tokens)) if accepted is None else accepted.kept.tolist()
        self.processors.accepted(positions, torch.tensor(tokens), accepted)
        for at in kept:
            row = int(positions.rows[at])
            self.history.extend(row, [tokens[at]])
            self.batch.num_known[row] += 1
            self.request_in(row).output.append(tokens[at])
        self.batch.check()
