"""The fingerprint of a checkpoint: a hash of all bytes of its files, which a machine computes once and keeps."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128

from quire.protocol.process.cache_folder import private_folder
from quire.protocol.process.log import event_logger

log = event_logger("checkpoint")

SUFFIXES = (".safetensors", ".gguf", ".json")
CHUNK_BYTES = 2**20
SETTLED_NS = 2 * 10**9
"""A hash is not kept if the file changed less than this ago: before the clock of its file system ticks, another change
has the same ctime."""

NOT_KEPT = "the hashes of the checkpoint are not kept, so each start reads its files again"


class Fingerprint(NamedTuple):
    """``digest``: 32 hexadecimal digits, equal for equal files. ``state``: the ``checkpoint_state`` in which they were
    read."""

    digest: str
    state: str


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files whose bytes count: no folders, and no pipes, which would block a reader. Raises OSError."""
    found = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in SUFFIXES]
    return sorted(file for file in found if file.is_file())


def checkpoint_state(path: Path) -> str:
    """Return 32 hexadecimal digits that differ after each change of the files, of which no byte is read.

    Each write gives a file another ctime, also if its size and mtime are set back. Raises OSError.
    """
    return _combined([(each.name, _state(each.stat())) for each in checkpoint_files(path)])


def begin_digest(path: Path) -> Future[Fingerprint]:
    """Compute ``checkpoint_digest`` in a thread, without delay for others or for the end of the process.

    The result is empty if a file cannot be read.
    """
    ended: Future[Fingerprint] = Future()

    def run() -> None:
        try:
            ended.set_result(checkpoint_digest(path))
        except Exception as error:  # others wait for a result in any case
            file, reason = (error.filename, error.strerror) if isinstance(error, OSError) else (None, error)
            log.error("cannot read the checkpoint", file=file or str(path), reason=reason)
            ended.set_result(Fingerprint("", ""))

    Thread(target=run, name="checkpoint", daemon=True).start()
    return ended


def checkpoint_digest(path: Path) -> Fingerprint:
    """Return the fingerprint. Files that have not changed since a process of this user read them are not read again.

    A process that computes the same fingerprint is awaited.

    Raises:
        OSError: a file cannot be read, or changes meanwhile.
    """
    began, known, kept = time.time_ns(), dict[str, str](), dict[str, str]()
    hashes, states = [], []
    with _kept_file(path) as file:
        if file is not None:
            with suppress(OSError, msgspec.MsgspecError):  # none yet, or damaged
                known = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        for each in checkpoint_files(path):
            with each.open("rb", buffering=0) as opened:
                # Of the open file and not of its name, which may lead to another file by now.
                state = _state(info := os.fstat(opened.fileno()))
                digest = known.get(state) or _hash(opened.fileno())
                # A hash over bytes of two versions belongs to neither.
                if _state(os.fstat(opened.fileno())) != state:
                    raise OSError(errno.EBUSY, "the file changes while it is read", str(each))
            hashes.append((each.name, digest))
            states.append((each.name, state))
            if state in known or began - info.st_ctime_ns > SETTLED_NS:
                kept[state] = digest
        if file is not None and kept != known:
            try:
                scratch = file.with_suffix(".new")
                scratch.touch(mode=0o600)
                scratch.write_bytes(msgspec.json.encode(kept))
                scratch.replace(file)
            except OSError as error:
                log.warning(NOT_KEPT, reason=error)
    return Fingerprint(_combined(hashes), _combined(states))


@contextmanager
def _kept_file(path: Path) -> Iterator[Path | None]:
    """Yield the file that keeps the hashes of a checkpoint's files, locked; None if this user cannot have one."""
    lock, file = -1, None
    try:
        folder = private_folder("checkpoints")
        name = sha256(os.fsencode(path.absolute())).hexdigest()[:16]
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # The ranks and engines of a machine start together. The first one reads the files, and the others wait for its
        # result instead of reading them from the same disk once more.
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / f"{name}.json"
    except (OSError, RuntimeError) as error:
        log.warning(NOT_KEPT, reason=error)
    try:
        yield file
    finally:
        if lock >= 0:
            os.close(lock)


def _state(info: os.stat_result) -> str:
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"


def _combined(parts: list[tuple[str, str]]) -> str:
    return sha256(ascii(parts).encode()).hexdigest()[:32]  # JSON has no form for names that are not UTF-8


def _hash(fd: int) -> str:
    """Return the hash of a file. Reading and hashing of a chunk do not hold the GIL."""
    digest, memory = xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    while count := os.readv(fd, [memory]):
        digest.update(memory[:count])
    return digest.hexdigest()
