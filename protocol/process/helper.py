"""A helper: a process that answers one question at a time, and that a question may kill.

For code that cannot be interrupted, or that comes with a checkpoint or from a client: what it does to the helper costs
one answer. Both ends of it. The helper makes itself ready once, and then has a child of its own answer, which a
limit ends without a lock of Python's being able to hinder it; the next child is there at once, and ready.

On the helper's standard input come questions (``_QUESTION`` and the bytes), on its output answers (``_ANSWER`` and the
bytes); both end with the process that started it.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

Answer = Callable[[bytes], bytes]

START_SECONDS = 60.0
"""A tokenizer of a large vocabulary takes seconds, on a busy machine more."""
STACK_BYTES = 256 * 2**20
"""Address space, of which next to nothing is touched: a library's recursion is as deep as its input."""
MAX_GROWN_BYTES = 64 * 2**20
"""What a child may have added to its memory when it has answered; one that has more makes room for the next."""

_QUESTION = struct.Struct("<IId")
"""Length, number, and the CPU seconds that the answer may take."""
_ANSWER = struct.Struct("<IIB")
"""Length, the question's number, and the signal that ended the child, if one did."""
_IDLE, _READING = 0, 2**32 - 1
"""Instead of the number of the question that the child is at."""
_PR_SET_PDEATHSIG = 1
_FULL = 3
"""Exit status of a child that makes room for the next."""


class HelperDied(Exception):
    """There is no answer.

    Attributes:
        signal: what ended the helper or its child; SIGPROF: the CPU seconds were over. 0: none did.
        was_hindered: the machine is to blame, not the question: it could not be started, or had not used up its CPU
            seconds when the wall's were over.
    """

    def __init__(self, number: int, was_starved: bool = False) -> None:
        super().__init__(f"the helper ended by signal {number}")
        self.signal = number
        self.was_starved = was_starved

    @property
    def took_too_long(self) -> bool:
        """It has used up its CPU seconds."""
        return self.signal == signal.SIGPROF

    @property
    def was_killed(self) -> bool:
        """It was killed from outside: the question is not to blame."""
        return self.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


class HelperStartError(HelperDied):
    """It could not be started: there is no descriptor or no memory for it now."""

    def __init__(self) -> None:
        super().__init__(0, was_starved=True)


class Helper:
    """The caller's end. Used by one thread at a time; the process is started when it is first needed, and again when
    it has ended."""

    def __init__(self, module: str, hello: bytes) -> None:
        """
        Args:
            module: run as ``python -P -m module``; it calls ``serve``.
            hello: what it needs to become ready.
        """
        self._module = module
        self._hello = hello
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._number = 0

    def start(self) -> bytes:
        """What it says once it is ready; nothing if it was. Raises HelperDied."""
        if self._process is not None and self._process.poll() is None:
            return b""
        self.close()
        command = [sys.executable, "-P", "-m", self._module]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError:
            raise HelperStartError() from None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        return self._exchange(self._hello, START_SECONDS, START_SECONDS)

    def ask(self, question: bytes, cpu_seconds: float, wall_seconds: float) -> bytes:
        """
        Args:
            wall_seconds: how long to wait where the helper does not even use its CPU seconds; then it is killed.

        Raises:
            HelperDied: the process, or only its child, which the next question will not notice.
        """
        self.start()
        return self._exchange(question, cpu_seconds, wall_seconds)

    def close(self) -> None:
        self._process = None
        self._end()

    def _exchange(self, question: bytes, cpu_seconds: float, wall_seconds: float) -> bytes:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + wall_seconds
        self._number = self._number % 2**31 + 1
        head = _QUESTION.pack(len(question), self._number, cpu_seconds)
        number = -1
        try:
            _send(process.stdin.fileno(), head + question, deadline)
            while number != self._number:  # an older one: its child was killed when it had answered
                head = _receive(process.stdout.fileno(), _ANSWER.size, deadline)
                length, number, ended_by = _ANSWER.unpack(head)
                answer = _receive(process.stdout.fileno(), length, deadline)
        except TimeoutError:
            self.close()
            raise HelperDied(0, was_starved=True) from None
        except (EOFError, BrokenPipeError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            self.close()
            raise HelperDied(max(0, -process.returncode)) from None
        if ended_by:
            raise HelperDied(ended_by)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """Of both generations: the child is killed when its parent is."""
    if process.poll() is None:
        process.kill()
    process.communicate()


def _send(fd: int, data: bytes, deadline: float) -> None:
    left = memoryview(data)
    while left:
        _await(fd, select.POLLOUT, deadline)
        left = left[os.write(fd, left) :]


def _receive(fd: int, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        _await(fd, select.POLLIN, deadline)
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _await(fd: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(fd, event)
    if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


# ---- the helper's own end


def serve(make: Callable[[bytes], tuple[bytes, Answer | None]], extra_bytes: int) -> None:
    """The whole life of a helper.

    Args:
        make: from the hello to what is said to it, and what answers; nobody, where that is already why not.
        extra_bytes: memory that a child may take beyond what it begins with; what allocates more fails or aborts.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # what the caller blocks or ignores is inherited
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    start_large_stack_thread(lambda: _serve(make, extra_bytes, answers), "helper").join()


def start_large_stack_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """A started thread that does not keep its process alive."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _serve(make: Callable[[bytes], tuple[bytes, Answer | None]], extra_bytes: int, answers: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller is gone, and this process soon ends, too
        _answer_all(make, extra_bytes, answers)


def _answer_all(make: Callable[[bytes], tuple[bytes, Answer | None]], extra_bytes: int, answers: int) -> None:
    state = mmap.mmap(-1, 4)  # the question that a child is at, which outlives it
    question = _next_question(state)
    if question is None:
        return
    number, _, hello = question
    said, answer = make(hello)
    _reply(answers, number, said)
    while answer is not None and _one_life(answer, extra_bytes, state, answers):
        pass


def _one_life(answer: Answer, extra_bytes: int, state: mmap.mmap, answers: int) -> bool:
    """Of a child; false when there is to be no other."""
    state[:] = _IDLE.to_bytes(4, "little")
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            _live(answer, extra_bytes, state, answers, parent)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    at = int.from_bytes(state[:], "little")
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status) == _FULL
    if at == _READING:
        return False  # the rest of a question is in the pipe
    if at != _IDLE:
        try:
            _reply(answers, at, b"", os.WTERMSIG(status))
        except BrokenPipeError:
            return False
    return True


def _live(answer: Answer, extra_bytes: int, state: mmap.mmap, answers: int, parent: int) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    most = _virtual_bytes() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begins_with = _max_resident_bytes()
    while (question := _next_question(state)) is not None:
        number, cpu_seconds, text = question
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answered = answer(text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(answers, number, answered)
        state[:] = _IDLE.to_bytes(4, "little")
        if _max_resident_bytes() - begins_with > MAX_GROWN_BYTES:
            os._exit(_FULL)
    os._exit(0)


def _next_question(state: mmap.mmap) -> tuple[int, float, bytes] | None:
    """(number, CPU seconds, question); None at the end. Unbuffered: what is not read is the next child's."""
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.poll()  # not within the read: one that is killed there may have taken what no other can read again
    state[:] = _READING.to_bytes(4, "little")
    head = os.read(0, _QUESTION.size)
    try:
        if head:
            head += _receive_all(_QUESTION.size - len(head))
            length, number, cpu_seconds = _QUESTION.unpack(head)
            text = _receive_all(length)
            state[:] = number.to_bytes(4, "little")
            return number, cpu_seconds, text
    except EOFError:
        pass
    return None


def _receive_all(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _reply(answers: int, number: int, text: bytes, ended_by: int = 0) -> None:
    left = memoryview(_ANSWER.pack(len(text), number, ended_by) + text)
    while left:
        left = left[os.write(answers, left) :]


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()


def _max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
