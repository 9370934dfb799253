"""A helper process, which answers one question at a time and which a question may kill.

For code that cannot be interrupted, or that processes input of a checkpoint or a client: a crash or a hang costs one
answer. The helper prepares once, then forks a child that answers. A limit ends the child by a signal, which no Python
lock can delay; the next child is forked at once, already prepared.

Questions (``_QUESTION`` and the bytes) arrive on the helper's standard input, answers (``_ANSWER`` and the bytes) leave
on its standard output. Helper and child exit with the process that started the helper. Both ends of the pipes are in
this module.
"""

import contextlib
import ctypes
import fcntl
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

from quire.protocol.process.signals import IGNORED_SIGNALS

Answer = Callable[[bytes], bytes]

PIPE_BYTES = 2**20
"""Capacity of a helper's input, so that a long question takes few calls. Linux gives any user as much."""
START_SECONDS = 60.0
"""Start timeout. A tokenizer with a large vocabulary takes seconds, on a busy machine more."""
STACK_BYTES = 256 * 2**20
"""Stack size of the answering thread, since a library may recurse as deep as its input. Mostly untouched."""
CHECK_SECONDS = 0.25
"""Interval at which a waiting caller checks whether the helper is stopped."""
MAX_GROWN_BYTES = 64 * 2**20
"""Maximum growth of a child's resident memory; a child that exceeds it exits after its answer and is replaced."""

_QUESTION = struct.Struct("<IId")
"""Length, number, and the CPU seconds allowed for the answer."""
_ANSWER = struct.Struct("<IIB")
"""Length, number of the question, and the signal that ended the child, or 0."""
_IDLE, _READING = 0, 2**32 - 1
"""Values of the shared state besides the number of the question in work."""
_PR_SET_PDEATHSIG = 1
_FULL = 3
"""Exit status of a child that used up its memory growth and must be replaced."""


class HelperDied(Exception):
    """The helper or its child ended without an answer.

    Attributes:
        signal: the signal that ended the helper or its child, or 0; SIGPROF means that the CPU seconds were used up,
            SIGSTOP that it was stopped, and therefore killed.
        was_starved: the machine is the cause, not the question: the helper could not be started, or the wall-clock
            limit passed before it had used its CPU seconds.
    """

    def __init__(self, number: int, was_starved: bool = False) -> None:
        super().__init__(f"the helper ended by signal {number}")
        self.signal = number
        self.was_starved = was_starved

    @property
    def took_too_long(self) -> bool:
        """Whether the CPU seconds were used up."""
        return self.signal == signal.SIGPROF

    @property
    def was_killed(self) -> bool:
        """Whether it was killed or stopped from outside, so that the question is not the cause."""
        return self.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP)


class HelperStartError(HelperDied):
    """The helper could not be started for lack of a file descriptor or memory, or it was killed for good."""

    def __init__(self) -> None:
        super().__init__(0, was_starved=True)


class Helper:
    """The caller's end of a helper process, for use by one thread at a time.

    The process is started on first use, and again after it ended.
    """

    def __init__(self, module: str, hello: bytes, start_seconds: float = START_SECONDS) -> None:
        """Args:
        module: module to run as ``python -P -m module``; it calls ``serve``.
        hello: data that the helper needs to prepare.
        start_seconds: time in which it must be prepared.
        """
        self._module = module
        self._hello = hello
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._is_killed = False
        self._number = 0

    def start(self) -> bytes:
        """Start the helper if it is not running. Return its first message, or nothing if it was running. Raises
        HelperDied.
        """
        if self._process is not None and self._process.poll() is None:
            return b""
        self.close()
        if self._is_killed:
            raise HelperStartError()
        command = [sys.executable, "-P", "-m", self._module]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError:
            raise HelperStartError() from None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with contextlib.suppress(OSError):  # the user's pipes have too many pages
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        if self._is_killed:  # while it was started
            process.kill()
        return self._exchange(self._hello, self._start_seconds, self._start_seconds)

    def ask(self, question: bytes, cpu_seconds: float, wall_seconds: float, tail: bytes = b"") -> bytes:
        """Return the answer to ``question``, starting the helper if necessary.

        Args:
            cpu_seconds: CPU limit of the answer.
            wall_seconds: time after which the helper is killed, for a machine too busy to give it its CPU seconds.
            tail: the end of the question, which is not copied.

        Raises:
            HelperDied: the helper ended, or only its child, which the next question does not notice.
        """
        self.start()
        return self._exchange(question, cpu_seconds, wall_seconds, tail)

    def ask_twice(self, question: bytes, cpu_seconds: float, wall_seconds: float, tail: bytes = b"") -> bytes:
        """As ``ask``, but once more if the helper crashed, or was killed or stopped: perhaps not by this question."""
        try:
            return self.ask(question, cpu_seconds, wall_seconds, tail)
        except HelperDied as died:
            if died.was_starved or died.took_too_long:
                raise
        return self.ask(question, cpu_seconds, wall_seconds, tail)

    def close(self) -> None:
        self._process = None
        self._end()

    def kill(self) -> None:
        """Kill the process for good, from any thread: the one that waits for an answer gets HelperDied."""
        self._is_killed = True
        if (process := self._process) is not None:
            process.kill()

    def _exchange(self, question: bytes, cpu_seconds: float, wall_seconds: float, tail: bytes = b"") -> bytes:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + wall_seconds
        self._number = self._number % 2**31 + 1
        head = _QUESTION.pack(len(question) + len(tail), self._number, cpu_seconds)
        number = -1
        try:
            _send(process, memoryview(head + question), deadline)
            _send(process, memoryview(tail), deadline)
            while number != self._number:  # an answer to an older question: its child was killed right after it
                head = _receive(process, _ANSWER.size, deadline)
                length, number, ended_by = _ANSWER.unpack(head)
                answer = _receive(process, length, deadline)
        except TimeoutError:
            self.close()
            raise HelperDied(0, was_starved=True) from None
        except HelperDied:  # it is stopped
            self.close()
            raise
        except (EOFError, BrokenPipeError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            self.close()
            raise HelperDied(max(0, -process.returncode)) from None
        if ended_by:
            raise HelperDied(ended_by)
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the helper; the kernel then kills its child.

    The end of its output is not awaited: a child that was stopped before it asked for its parent's death signal holds
    the pipe until it is continued, and then exits.
    """
    if process.poll() is None:
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _send(process: subprocess.Popen[bytes], left: memoryview, deadline: float) -> None:
    assert process.stdin is not None
    while left:
        _await(process, process.stdin.fileno(), select.POLLOUT, deadline)
        left = left[os.write(process.stdin.fileno(), left) :]


def _receive(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout is not None
    data = b""
    while len(data) < size:
        _await(process, process.stdout.fileno(), select.POLLIN, deadline)
        piece = os.read(process.stdout.fileno(), size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _await(process: subprocess.Popen[bytes], fd: int, event: int, deadline: float) -> None:
    """Wait for ``event``. Raises TimeoutError at the deadline, and HelperDied if the helper is stopped."""
    poller = select.poll()
    poller.register(fd, event)
    while not poller.poll(1000 * min(CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise TimeoutError
        if is_stopped(process.pid):
            raise HelperDied(signal.SIGSTOP)


def is_stopped(pid: int) -> bool:
    """Whether the helper or its child is stopped by a signal. Always False on systems without these files."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        pids = [str(pid), *(child for task in tasks for child in (task / "children").read_text("ascii").split())]
        states = [Path(f"/proc/{each}/stat").read_text("ascii").rpartition(")")[2].split()[0] for each in pids]
    except OSError:
        return False
    return "T" in states


# ---- the helper's own end


def serve(make: Callable[[bytes], tuple[bytes, Answer | None]], extra_bytes: int) -> None:
    """Run a helper process until its input ends.

    Args:
        make: returns, for the hello, the first message and the function that answers questions; None instead of the
            function ends the helper, and the message says why.
        extra_bytes: memory that a child may allocate beyond its memory at start; allocations above it fail or abort.
    """
    begin_helper()
    answers = os.dup(1)
    os.dup2(2, 1)  # a library's prints must not mix with answers
    start_large_stack_thread(lambda: _serve(make, extra_bytes, answers), "helper").join()


def begin_helper() -> None:
    """Set the signals of a helper process, which inherits the mask and handlers of its starter."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the caller's signal mask and handlers are inherited
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGABRT):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *IGNORED_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def start_large_stack_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start and return a daemon thread with a stack of STACK_BYTES."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _serve(make: Callable[[bytes], tuple[bytes, Answer | None]], extra_bytes: int, answers: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the caller exited; this process ends soon
        _answer_all(make, extra_bytes, answers)


def _answer_all(make: Callable[[bytes], tuple[bytes, Answer | None]], extra_bytes: int, answers: int) -> None:
    state = mmap.mmap(-1, 4)  # the number of the question in work, readable after the child's death
    question = _next_question(state)
    if question is None:
        return
    number, _, hello = question
    greeting, answer = make(hello)
    _reply(answers, number, greeting)
    while answer is not None and _run_child(answer, extra_bytes, state, answers):
        pass


def _run_child(answer: Answer, extra_bytes: int, state: mmap.mmap, answers: int) -> bool:
    """Fork a child and wait for its end. Return False if no other child may follow."""
    state[:] = _IDLE.to_bytes(4, "little")
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            _answer_in_child(answer, extra_bytes, state, answers, parent)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    at = int.from_bytes(state[:], "little")
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status) == _FULL
    if at == _READING:
        return False  # the rest of a question is in the pipe: no child can read on
    if at != _IDLE:
        try:
            _reply(answers, at, b"", os.WTERMSIG(status))
        except BrokenPipeError:
            return False
    return True


def _answer_in_child(answer: Answer, extra_bytes: int, state: mmap.mmap, answers: int, parent: int) -> NoReturn:
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
    """Return (number, CPU seconds, question), or None at the end of input.

    Reads unbuffered: bytes that this child does not read are the next child's.
    """
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.poll()  # not in os.read: a child killed there may have consumed bytes that no other child can read
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
