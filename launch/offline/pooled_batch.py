"""One call of the offline API for vectors or scores: a bounded number of its inputs is in the engine at a time."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from quire.frontend.engine.engine_client import Update
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.text.pooling.inputs import for_prompt
from quire.frontend.text.prompts import Prompt
from quire.launch.offline.batch import MAX_SUBMITTED, BlockingEngine
from quire.launch.offline.pooling_output import PoolingRequestOutput
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.pooling_params import NO_SAMPLING, PoolingParams
from quire.protocol.wire.adapter_messages import AdapterRef

Rows = npt.NDArray[np.float32]
RowsOutput = PoolingRequestOutput[Rows]


@dataclass(slots=True)
class PooledInputs:
    """The inputs of one call.

    Attributes:
        first_number: number of the first one, for its id in the engine.
        encode: returns the prompt of an input.
        priorities, adapters: of each input.
    """

    first_number: int
    encode: Callable[[int], Prompt]
    params: PoolingParams
    priorities: list[int]
    adapters: list[AdapterRef | None]


@dataclass(slots=True)
class PooledBatch:
    """The inputs of one call in the engine, and their outputs in order. Inputs are tokenized as they are submitted."""

    engine: BlockingEngine
    inputs: PooledInputs
    outputs: list[RowsOutput | None] = field(init=False)
    _open: dict[int, tuple[Stream, RowsOutput, Prompt]] = field(default_factory=dict)
    _ready: deque[int] = field(default_factory=deque)
    _put_back: list[tuple[int, Prompt]] = field(default_factory=list)
    _next: int = 0
    _is_refused: bool = False
    """The scheduler's queue was full, and no input has ended since."""

    def __post_init__(self) -> None:
        self.outputs = [None] * len(self.inputs.priorities)

    def finish(self, bar: "tqdm[Any]") -> list[RowsOutput]:
        """Run until all inputs have ended, and return their outputs.

        Raises:
            InvalidRequest: an input is refused.
            EngineError: the engine has failed.
        """
        most = self.engine.config.max_num_queued_reqs or MAX_SUBMITTED
        self._submit(min(most, MAX_SUBMITTED))
        while self._open:
            self.engine.wait()
            while self._ready:
                self._take(self._ready.popleft(), bar)
            self._submit(min(most, MAX_SUBMITTED))
        return [output for output in self.outputs if output is not None]

    def abort(self) -> None:
        """Abort all inputs in the engine, unless it has failed."""
        for stream, *_ in self._open.values():
            try:
                self.engine.session.abort(stream)
            except EngineError:
                return

    def _submit(self, most: int) -> None:
        while len(self._open) < most and not (self._is_refused and self._open):
            if self._put_back:
                index, prompt = self._put_back.pop()
            elif self._next < len(self.outputs):
                index, prompt = self._next, self.inputs.encode(self._next)
                self._next += 1
            else:
                return
            self._start(index, prompt)

    def _start(self, index: int, prompt: Prompt) -> None:
        inputs = self.inputs
        name, params = f"offline-{inputs.first_number + index}", for_prompt(inputs.params, prompt)
        terms = Terms(inputs.priorities[index], adapter=inputs.adapters[index])
        request = terms.request(name, prompt, NO_SAMPLING, 0, pooling=params)
        output = RowsOutput(request.request_id, prompt.text, prompt.token_ids.tolist())
        self._open[index] = self.engine.submit(request, lambda: self._ready.append(index)), output, prompt

    def _take(self, index: int, bar: "tqdm[Any]") -> None:
        stream, output, prompt = self._open[index]
        try:
            update = stream.take()
        except InvalidRequest as refused:
            if refused.code != "queue_full":
                raise
            del self._open[index]
            self._put_back.append((index, prompt))
            self._is_refused = True
            return
        if update is None or update.ended is None:
            return
        del self._open[index]
        self._is_refused = False
        self.outputs[index] = _ended(output, update)
        bar.update()


def _ended(output: RowsOutput, update: Update) -> RowsOutput:
    output.num_cached_tokens = update.num_cached_tokens
    output.error = update.pooling_error or None
    output.outputs = None if output.error else update.pooled
    return output
