"""A helper process in which every grammar is compiled first: libraries hang and crash on some, and then only it ends.

What it tells is only whether a grammar will do: a compiled one cannot travel. It is started by the compile pool as
``python -P -m quire.scheduler_proc.structured.guard``.
"""

import resource

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.process.helper import Answer, Helper, HelperDied, serve
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarBackend, GrammarBusy, GrammarTooSlow
from quire.scheduler_proc.structured.backends import make_backend

COMPILE_SECONDS = 1.0
"""CPU time that a grammar may take."""
WALL_SECONDS = 15.0
"""For the same, where the machine is busy, or something has stopped the guard."""
MAX_COMPILE_BYTES = 192 * 2**20
MAX_ADDRESS_BYTES = 1024 * 2**20
"""Where the guard is stopped in the middle: allocators reserve more than they touch."""

CRASHED = "structured_outputs cannot be used: compiling them failed"
_TOO_LARGE = "structured_outputs cannot be used: they are too complex"


class Guard:
    """The parent's end. Used by one thread at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self._helper = Helper("quire.scheduler_proc.structured.guard", msgspec.msgpack.encode(config))
        self._why_not = ""

    def start(self) -> None:
        """Raises GrammarRefused where no grammar can be compiled for this model."""
        try:
            self._why_not = self._why_not or self._helper.start().decode()
        except HelperDied:
            raise GrammarBusy() from None
        if self._why_not:
            self._helper.close()
            raise GrammarRefused(self._why_not)

    def check(self, wanted: StructuredOutputs, cpu_seconds: float) -> None:
        """Raises GrammarRefused unless it compiles: in time, in bounded memory, and without a crash."""
        try:
            self._check(wanted, cpu_seconds)
        except HelperDied as died:
            if not died.was_killed:
                raise _refusal(died, cpu_seconds) from None
            self._check_again(wanted, cpu_seconds)

    def close(self) -> None:
        self._helper.close()

    def _check(self, wanted: StructuredOutputs, cpu_seconds: float) -> None:
        self.start()
        reason = self._helper.ask(msgspec.msgpack.encode(wanted), cpu_seconds, WALL_SECONDS)
        if reason:
            raise GrammarRefused(reason.decode())

    def _check_again(self, wanted: StructuredOutputs, cpu_seconds: float) -> None:
        """Somebody killed the guard over a grammar that may be innocent; twice is no accident."""
        try:
            self._check(wanted, cpu_seconds)
        except HelperDied as died:
            raise _refusal(died, cpu_seconds) from None


def _refusal(died: HelperDied, cpu_seconds: float) -> GrammarRefused:
    if died.was_killed or died.was_starved:
        return GrammarBusy()
    return GrammarTooSlow(cpu_seconds) if died.took_too_long else GrammarRefused(CRASHED)


def main() -> None:
    serve(_make, MAX_ADDRESS_BYTES)


def _make(hello: bytes) -> tuple[bytes, Answer | None]:
    try:
        backend = make_backend(msgspec.msgpack.decode(hello, type=EngineConfig))
    except GrammarRefused as refused:
        return str(refused).encode(), None
    return b"", lambda question: _reason(backend, msgspec.msgpack.decode(question, type=StructuredOutputs)).encode()


def _reason(backend: GrammarBackend, wanted: StructuredOutputs) -> str:
    """Why it is refused; nothing where it is not."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        backend.compile(wanted)
    except GrammarRefused as refused:
        return str(refused)
    except BaseException:  # a library's panic too
        return CRASHED
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return _TOO_LARGE if grown > MAX_COMPILE_BYTES else ""


if __name__ == "__main__":
    main()
