"""The scheduler's end of the processes that compute bitmasks. Nothing here waits for them."""

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
from typing import Protocol

import msgspec
import numpy as np

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.structured.backend import Masks
from quire.scheduler_proc.structured.mask_messages import FromHelper, Started, ToHelper
from quire.scheduler_proc.structured.mask_process import HEAD_BYTES, LENGTH, PRIVATE, SHARED

RECEIVED_BYTES = 2**16


class MaskHelper(Protocol):
    """Computes the masks of outputs, in the order of the messages.

    Attributes:
        masks: int32 ``[num_places, ceil(vocab_size / 32)]``: the memory that the masks are written to.
        is_dead: it will not answer any more.
    """

    masks: Masks
    is_dead: bool

    @property
    def works_on(self) -> int:
        """The output that is computed alone now, or was when the helper died; otherwise 0."""
        ...

    @property
    def has_unsent(self) -> bool: ...

    def fileno(self) -> int: ...

    def send(self, message: ToHelper) -> None: ...

    def receive(self) -> list[FromHelper]: ...

    def close(self) -> None:
        """End the helper at once."""
        ...


class HelperMaker(Protocol):
    """Opens helpers."""

    def open(self, *, private: bool) -> MaskHelper: ...

    def close(self) -> None: ...


class MaskProcesses:
    """Owns the parent of all helpers, which it starts at the first helper and again after its death."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._num_places = config.max_num_seqs * (1 + config.num_speculative_tokens) + 1
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def open(self, *, private: bool) -> "HelperProcess":
        """Open a helper; it starts in its own time. ``private``: it yields the processor to all other processes.

        Raises:
            OSError: file descriptors, memory or processes are short.
        """
        control = self._start()
        num_words = (self._config.model.vocab_size + 31) // 32
        memory = os.memfd_create("quire-masks")
        try:
            os.ftruncate(memory, HEAD_BYTES + 4 * num_words * self._num_places)
            with contextlib.ExitStack() as on_failure:
                ours, theirs = socket.socketpair()
                on_failure.enter_context(ours)
                with theirs:
                    socket.send_fds(control, [PRIVATE if private else SHARED], [theirs.fileno(), memory])
                helper = HelperProcess(ours, mmap.mmap(memory, 0), num_words)
                on_failure.pop_all()
                return helper
        finally:
            os.close(memory)

    def close(self) -> None:
        """Kill the parent; the kernel then kills its children."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> socket.socket:
        if self._process is None or self._control is None or self._process.poll() is not None:
            self.close()
            try:
                self._control, theirs = socket.socketpair()
                with theirs:
                    command = [sys.executable, "-P", "-m", "quire.scheduler_proc.structured.mask_process"]
                    self._process = subprocess.Popen(command, stdin=theirs.fileno())
                hello = msgspec.msgpack.encode(self._config)
                self._control.sendall(LENGTH.pack(len(hello)) + hello)
                self._control.setblocking(False)
            except OSError:
                self.close()
                raise
        return self._control


class HelperProcess:
    """One child. Implements ``MaskHelper``."""

    def __init__(self, connection: socket.socket, memory: mmap.mmap, num_words: int) -> None:
        connection.setblocking(False)
        self.is_dead = False
        self._connection = connection
        self._head = np.frombuffer(memory, np.int32, 1)
        self.masks: Masks = np.frombuffer(memory, np.int32, offset=HEAD_BYTES).reshape(-1, num_words)
        self._pid = 0
        self._unsent = bytearray()
        self._unread = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromHelper] = msgspec.msgpack.Decoder(FromHelper)

    @property
    def works_on(self) -> int:
        return int(self._head[0])

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ToHelper) -> None:
        encoded = self._encoder.encode(message)
        self._unsent += LENGTH.pack(len(encoded)) + encoded
        self._send()

    def receive(self) -> list[FromHelper]:
        self._send()
        while not self.is_dead and (piece := self._read()):
            self._unread += piece
        return list(self._decoded())

    def close(self) -> None:
        self.is_dead = True
        self._connection.close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # it may be stopped, or busy
            self._pid = 0

    def _send(self) -> None:
        try:
            while self._unsent and not self.is_dead:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.is_dead = True

    def _read(self) -> bytes:
        try:
            piece = os.read(self._connection.fileno(), RECEIVED_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            piece = b""
        self.is_dead |= not piece
        return piece

    def _decoded(self) -> "list[FromHelper]":
        messages: list[FromHelper] = []
        at = 0
        while len(self._unread) - at >= LENGTH.size:
            size = LENGTH.unpack_from(self._unread, at)[0]
            if len(self._unread) - at - LENGTH.size < size:
                break
            at += LENGTH.size
            message = self._decoder.decode(self._unread[at : at + size])
            at += size
            if isinstance(message, Started):
                self._pid = message.pid
            messages.append(message)
        del self._unread[:at]
        return messages
