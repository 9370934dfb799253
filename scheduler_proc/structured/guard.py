"""A process in which every grammar is compiled first: libraries hang and crash on some, and then only it ends.

Both ends of it. What it tells is only whether a grammar will do: a compiled one cannot travel. It is started by the
compile pool as ``python -P -m quire.scheduler_proc.structured.guard``, and ends with its standard input.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

import msgspec

from quire.protocol.child import PR_SET_PDEATHSIG
from quire.protocol.config import EngineConfig
from quire.protocol.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.backend import GrammarBackend, GrammarRefused
from quire.scheduler_proc.structured.make import make_backend

COMPILE_SECONDS = 2.0
MAX_COMPILE_BYTES = 192 * 2**20
STACK_BYTES = 256 * 2**20
"""Address space, of which next to nothing is touched: a library's recursion is as deep as chains of rules are long."""

_CRASHED = "structured_outputs cannot be used: compiling them failed"
_TOO_LONG = f"structured_outputs took longer than {COMPILE_SECONDS:g} s to compile"
_TOO_LARGE = "structured_outputs cannot be used: they are too complex"


class Guard:
    """The parent's end. Used by one thread at a time; the process is started when it is first needed, and again when
    it has ended."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises GrammarRefused where no grammar can be compiled for this model."""
        if self._process is not None:
            return
        command = [sys.executable, "-P", "-m", "quire.scheduler_proc.structured.guard"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._ask(msgspec.msgpack.encode(self._config))
        except GrammarRefused:
            self.close()
            raise

    def check(self, wanted: StructuredOutputs) -> None:
        """Raises GrammarRefused unless it compiles: in time, in bounded memory, and without a crash."""
        self.start()
        self._ask(msgspec.msgpack.encode(wanted))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()

    def _ask(self, question: bytes) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, question)
            answer = _read(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            status = process.wait()
            self.close()
            raise GrammarRefused(_TOO_LONG if status == -signal.SIGALRM else _CRASHED)
        if answer:
            raise GrammarRefused(answer.decode())


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(4, "little") + frame)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None at the end."""
    head = pipe.read(4)
    length = int.from_bytes(head, "little")
    frame = pipe.read(length)
    return frame if len(head) == 4 and len(frame) == length else None


def on_a_large_stack(work: Callable[[], None], name: str) -> threading.Thread:
    """A started thread that does not keep its process alive."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def main() -> None:
    """The other end: first the configuration, then one StructuredOutputs after the other; each is answered by why it
    is refused, or by nothing."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The end of standard input does not reach one that compiles, or is stopped. The thread that started this process
    # lives as long as its own process does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    on_a_large_stack(lambda: _serve(sys.stdin.buffer, answers), "grammars").join()


def _serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        _answer_all(questions, answers)


def _answer_all(questions: IO[bytes], answers: IO[bytes]) -> None:
    frame = _read(questions)
    if frame is None:
        return
    try:
        backend = make_backend(msgspec.msgpack.decode(frame, type=EngineConfig))
    except GrammarRefused as refused:
        _write(answers, str(refused).encode())
        return
    _write(answers, b"")
    while (frame := _read(questions)) is not None:
        reason = _reason(backend, msgspec.msgpack.decode(frame, type=StructuredOutputs))
        _write(answers, reason.encode())
        if reason == _TOO_LARGE:
            return  # with all that memory


def _reason(backend: GrammarBackend, wanted: StructuredOutputs) -> str:
    """Why it is refused. The kernel ends this process where that takes too long: no lock of Python's can hinder it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)
    try:
        backend.compile(wanted)
    except GrammarRefused as refused:
        return str(refused)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return _TOO_LARGE if grown > MAX_COMPILE_BYTES else ""


if __name__ == "__main__":
    main()
