"""The processes that compute bitmasks: a parent that holds the vocabulary, and a forked child for each mask helper.

``helper_process.py`` starts it as ``python -P -m quire.scheduler_proc.structured.mask_process``, with a socket as its
input. Over this socket arrive the configuration, and then, for each helper, one byte with two file descriptors: the
helper's socket and its shared memory. The parent compiles and matches nothing, so that a new child is ready within
milliseconds and begins with a small memory.
"""

import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from quire.protocol.config import EngineConfig
from quire.protocol.process.helper import begin_helper, start_large_stack_thread
from quire.protocol.process.host_limits import resident_bytes
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.scheduler_proc.structured.backend import GrammarBackend
from quire.scheduler_proc.structured.backends import make_backend
from quire.scheduler_proc.structured.mask_maker import MaskMaker
from quire.scheduler_proc.structured.mask_messages import Grown, Started, ToHelper

LENGTH = struct.Struct("<I")
"""Length of a message, which precedes it."""
HEAD_BYTES = 64
"""Bytes of the shared memory before the masks; the first four are the output that is computed alone, or 0."""
SHARED, PRIVATE = b"s", b"p"
"""The byte that opens a helper for many grammars, or for one that is expensive."""

MESSAGE_SECONDS = 2.0
"""CPU time of one message, after which the helper ends. A mask takes up to some ten milliseconds, a compilation 1 s."""
MAX_ADDRESS_BYTES = 2048 * 2**20
"""Address space that a helper may use beyond that of its parent; allocators reserve more than they use."""
REPORT_BYTES = 4 * 2**20
"""Growth of a helper's memory after which it reports its size again."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    begin_helper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    start_large_stack_thread(_serve, "masks").join()


def _serve() -> None:
    control = socket.socket(fileno=os.dup(0))
    hello = next(_messages(control), None)
    if hello is None:
        return
    config = msgspec.msgpack.decode(hello, type=EngineConfig)
    try:
        backend = make_backend(config)
    except GrammarRefused:
        return  # the guard has refused every grammar with this reason
    gc.freeze()
    parent = os.getpid()
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not kind or len(descriptors) != 2:
            return
        if not os.fork():
            try:
                control.close()
                _serve_helper(backend, config, socket.socket(fileno=descriptors[0]), descriptors[1], parent, kind)
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _serve_helper(
    backend: GrammarBackend, config: EngineConfig, connection: socket.socket, memory: int, parent: int, kind: bytes
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    if kind == PRIVATE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    most = _virtual_bytes() + MAX_ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    shared = mmap.mmap(memory, 0)
    head = np.frombuffer(shared, np.int32, 1)
    masks = np.frombuffer(shared, np.int32, offset=HEAD_BYTES).reshape(-1, (config.model.vocab_size + 31) // 32)

    def works_on(output: int) -> None:
        head[0] = output

    maker = MaskMaker(backend, config, masks, works_on)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToHelper)
    base = reported = resident_bytes()
    connection.sendall(_framed(encoder.encode(Started(os.getpid()))))
    for raw in _messages(connection):
        signal.setitimer(signal.ITIMER_PROF, MESSAGE_SECONDS)
        for answers in maker.handle(decoder.decode(raw)):
            connection.sendall(b"".join(_framed(encoder.encode(answer)) for answer in answers))
        signal.setitimer(signal.ITIMER_PROF, 0)
        now = resident_bytes()
        if abs(now - reported) > REPORT_BYTES:
            reported = now
            connection.sendall(_framed(encoder.encode(Grown(now - base))))


def _messages(connection: socket.socket) -> Iterator[bytes]:
    """Yield the messages of a connection until it is closed. Never reads beyond a message."""
    while head := _receive(connection, LENGTH.size):
        yield _receive(connection, LENGTH.unpack(head)[0])


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(connection.fileno(), size - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _framed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
