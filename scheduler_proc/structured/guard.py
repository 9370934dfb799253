"""A helper process that compiles every grammar first: where a library hangs or crashes, only the helper ends.

It returns whether the grammar is accepted and how much memory it takes; a helper then compiles it again, because a
compiled grammar cannot be sent between processes. The
compile pool starts it as ``python -P -m quire.scheduler_proc.structured.guard``.
"""

import resource

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.process.helper import Answer, Helper, HelperDied, serve
from quire.protocol.process.host_limits import resident_bytes
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarBackend, GrammarBusy, GrammarTooSlow
from quire.scheduler_proc.structured.backends import make_backend

COMPILE_SECONDS = 1.0
"""CPU time limit of one compilation."""
WALL_SECONDS = 30.0
"""Wall time limit of one compilation, in case the machine is overloaded or the helper is stopped."""
MAX_COMPILE_BYTES = 192 * 2**20
MAX_ADDRESS_BYTES = 1024 * 2**20
"""Address space limit, which ends the helper during a compilation: allocators reserve more than they use."""

CRASHED = "structured_outputs cannot be used: compilation failed"
_TOO_LARGE = "structured_outputs cannot be used: they are too complex"


class _Checked(msgspec.Struct, frozen=True):
    """Why a grammar is refused, or the memory that it takes."""

    reason: str
    num_bytes: int = 0


class Guard:
    """The parent's interface to the helper. Used by one thread at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self._helper = Helper("quire.scheduler_proc.structured.guard", msgspec.msgpack.encode(config))
        self._start_refusal = ""

    def start(self) -> None:
        """Start the helper. Raises GrammarRefused when no grammar can be compiled for this model."""
        try:
            self._start_refusal = self._start_refusal or self._helper.start().decode()
        except HelperDied:
            raise GrammarBusy() from None
        if self._start_refusal:
            self._helper.close()
            raise GrammarRefused(self._start_refusal)

    def check(self, wanted: StructuredOutputs, cpu_seconds: float) -> int:
        """Return the memory of the compiled grammar in bytes.

        Raises:
            GrammarRefused: it does not compile in time, in bounded memory and without a crash.
        """
        self.start()
        try:
            # Twice: the kernel's out-of-memory killer takes any process, and a client should not get an error for
            # another program's memory.
            answer = self._helper.ask_twice(msgspec.msgpack.encode(wanted), cpu_seconds, WALL_SECONDS)
        except HelperDied as died:
            raise _refusal(died, cpu_seconds) from None
        checked = msgspec.msgpack.decode(answer, type=_Checked)
        if checked.reason:
            raise GrammarRefused(checked.reason)
        return checked.num_bytes

    def close(self) -> None:
        self._helper.close()


def _refusal(died: HelperDied, cpu_seconds: float) -> GrammarRefused:
    # Busy is retried by clients, refused is cached for all later requests: only the grammar's own fault may be cached.
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
    return b"", lambda question: msgspec.msgpack.encode(
        _compile(backend, msgspec.msgpack.decode(question, type=StructuredOutputs))
    )


def _compile(backend: GrammarBackend, wanted: StructuredOutputs) -> _Checked:
    # Resident memory of the process, since the libraries do not tell what a grammar takes. It is measured here, where
    # nothing else allocates.
    before, peak_before = resident_bytes(), _peak_bytes()
    try:
        compiled = backend.compile(wanted)
    except GrammarRefused as refused:
        return _Checked(str(refused))
    except BaseException:  # includes a library's panic
        return _Checked(CRASHED)
    num_bytes = resident_bytes() - before
    del compiled
    return _Checked(_TOO_LARGE if _peak_bytes() - peak_before > MAX_COMPILE_BYTES else "", max(0, num_bytes))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
