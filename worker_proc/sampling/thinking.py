"""``thinking_token_budget``: the end marker of thinking is forced when the budget is used up."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.thinking import ThinkingState, without_plain
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.builtin.base import NO_INTS, RowProcessor, find


@dataclass(slots=True)
class ThoughtBudget:
    """Thinking budget of one request. ``state`` has read the first ``num_read`` tokens of ``output``."""

    num_tokens: int
    state: ThinkingState
    output: list[int]
    num_read: int = 0

    def forced_token(self, drafts: list[int]) -> int | None:
        """Return the token that must follow the output and ``drafts``, or None."""
        self.state.extend(self.output[self.num_read :])
        self.num_read = len(self.output)
        state = self.state
        if drafts:
            state = state.copy()
            state.extend(drafts)
        return state.forced_token(self.num_tokens)


class ThinkingBudget(RowProcessor[ThoughtBudget]):
    """Forces the end marker of thinking in rows whose budget is used up.

    Its state is a pure function of each row's prompt and output, so rejected drafts leave no trace.

    Attributes:
        places: int64: the positions that were last prepared whose next token is forced.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, is_pin_memory: bool, transfer: Transfer | None = None
    ) -> None:
        self._start, self._end = config.thinking_start_token_ids, config.thinking_end_token_ids
        self.places, self._sent = NO_INTS, list[torch.Tensor]()
        super().__init__(config, device, is_pin_memory, transfer)

    def reads_output(self, params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None and bool(self._start and self._end)

    def prepare(self, positions: SampledPositions) -> None:
        self.places, tokens = self._forced(positions)
        if len(self.places):
            self._sent = self._transfer(self.places, tokens)

    def edit(self, logits: torch.Tensor, positions: SampledPositions) -> None:
        self.prepare(positions)
        self.force(logits)

    def _forced(self, positions: SampledPositions) -> tuple[Ints, Ints]:
        """Return the positions whose next token is forced, and these tokens."""
        which, at = find(positions, self._rows)
        places: list[int] = []
        tokens: list[int] = []
        for row, place in zip(self._rows[which].tolist(), at.tolist(), strict=True):
            offset = positions.offsets[place]
            drafts = positions.drafts[place - offset : place].tolist() if offset else []
            token = self._states[row].forced_token(drafts)
            if token is not None:
                places.append(place)
                tokens.append(token)
        return np.array(places, np.int64), np.array(tokens, np.int64)

    def force(self, logits: torch.Tensor) -> None:
        """Allow only the forced token at each of the ``places`` that were prepared, even if it was forbidden."""
        if len(self.places):
            at, there = self._sent
            logits.index_fill_(0, at, -torch.inf)
            logits[at, there] = 0.0

    def _new_state(self, params: SamplingParams, prompt: list[int], output: list[int]) -> ThoughtBudget | None:
        if params.thinking_token_budget is None or not (self._start and self._end):
            return None
        searched = without_plain(prompt, params.plain_spans).tolist()
        return ThoughtBudget(params.thinking_token_budget, ThinkingState(self._start, self._end, searched), output)

    def _rows_changed(self) -> None:
        self._rows = np.fromiter(self._states, np.int64, len(self._states))
