"""How an answer of the engine is read for a caller of the offline API."""

from typing import NamedTuple

from quire.frontend.engine.answers import Answer, OutputDelta
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.update import Update
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import TokenTexts
from quire.launch.offline.batch import BlockingEngine
from quire.launch.offline.request_output import CompletionOutput, append_delta
from quire.protocol.request.sampling_params import SamplingParams


class Reading(NamedTuple):
    """What all answers of one engine are read with."""

    engine: BlockingEngine
    text_in: TextIn
    token_texts: TokenTexts


class ReadAnswer:
    """One answer of the engine, and its output as far as it has been read."""

    def __init__(self, reading: Reading, stream: Stream, prompt: Prompt, params: SamplingParams, index: int) -> None:
        """``index``: of the answer among those of its prompt."""
        self.output = CompletionOutput(index)
        self._reading = reading
        self._answer = Answer(stream, reading.text_in, prompt, params)

    def add(self, update: Update) -> OutputDelta:
        """Add an update to the output, and return what it has added."""
        delta = self._answer.assemble(update)
        append_delta(self.output, delta, self._reading.token_texts, self._reading.engine.config.model.moe)
        return delta
