"""One read of a call of ``LLM.decide`` in the engine."""

from collections.abc import Callable

from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.text.decisions.reads import Read
from quire.launch.offline.batch import BatchPart, BlockingEngine
from quire.protocol.errors import EngineError


class ReadPart(BatchPart):
    def __init__(self, engine: BlockingEngine, name: str, terms: Terms, read: Read) -> None:
        self._engine, self._name, self.terms, self._read = engine, name, terms, read

    def submit(self, on_update: Callable[[], None]) -> Stream:
        request = self.terms.request(self._name, self._read.prompt(), self._read.params, 0)
        return self._engine.submit(request, on_update)

    def take(self, update: Update) -> bool:
        self._read.note(update.logprobs)
        if update.detail:
            raise EngineError(update.detail)
        return update.ended is not None
