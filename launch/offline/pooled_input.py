"""One input of a call for vectors or scores in the engine."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.text.pooling.inputs import for_prompt
from quire.frontend.text.prompts import Prompt
from quire.launch.offline.batch import BatchPart, BlockingEngine
from quire.launch.offline.pooling_output import PoolingRequestOutput
from quire.protocol.request.pooling_params import NO_SAMPLING, PoolingParams

Rows = npt.NDArray[np.float32]
RowsOutput = PoolingRequestOutput[Rows]


class PooledInput(BatchPart):
    """Owns the output of one input, which is tokenized as it is submitted."""

    output: RowsOutput

    def __init__(
        self, engine: BlockingEngine, name: str, terms: Terms, encode: Callable[[], Prompt], params: PoolingParams
    ) -> None:
        self._engine, self._name, self.terms, self._encode, self._params = engine, name, terms, encode, params
        self._prompt: Prompt | None = None

    def submit(self, on_update: Callable[[], None]) -> Stream:
        prompt = self._prompt = self._encode() if self._prompt is None else self._prompt
        self.output = RowsOutput(self._name, prompt.text, prompt.token_ids.tolist())
        request = self.terms.request(self._name, prompt, NO_SAMPLING, 0)
        return self._engine.submit(replace(request, pooling=for_prompt(self._params, prompt)), on_update)

    def take(self, update: Update) -> bool:
        if update.ended is None:
            return False
        self.output.num_cached_tokens = update.num_cached_tokens
        self.output.error = update.pooling_error or None
        self.output.outputs = None if self.output.error else update.pooled
        return True
