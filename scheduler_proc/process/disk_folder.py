"""The folder of the disk tier: one file of pages per rank, which outlives the engine."""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from zlib import crc32

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.wire.curve_keys import require_private
from quire.scheduler_proc.process.fingerprint import fingerprint

log = event_logger("scheduler")

MAGIC = b"Quire KV pages\n"
FORMAT = 1
SECTOR = 4096
"""Bytes of the description in page 0, and of the part of a page that has its header."""

PRIVATE = (
    "a folder, not a link, that belongs to this user and that no other may change: set its mode to 0700, or name a new "
    "folder in it"
)

START_S, ANSWER_S = 10.0, 2.0
"""Time limits for the disk at the start of an engine, and later, while requests wait."""


class Description(msgspec.Struct, frozen=True):
    """The description of a file, as JSON in its page 0 between MAGIC and a CRC-32.

    Attributes:
        forgotten: pages with a generation up to this one have no content.
    """

    format: int
    fingerprint: str
    page_bytes: int
    forgotten: int


class DiskFolder:
    """Owns the files of pages. Workers write all pages but the first of each file.

    A file is created under another name and renamed when it has its description, so that each file with a final name
    begins with MAGIC. If only the rest of a description cannot be read, the file is created again, without contents.
    Each access to the disk runs in a thread and is given up after some seconds, because a disk may never answer.

    Attributes:
        paths: the file of each rank.
        num_pages: pages of each file, page 0 included; 0 before ``open``.
        forgotten: see Description; the same in all files.
    """

    def __init__(self, config: EngineConfig, *, is_restart: bool = False) -> None:
        """Lock the folder, and check that the files can be used.

        Args:
            is_restart: whether this scheduler replaces another.

        Raises:
            ConfigError: they cannot; the message says why and what to do.
        """
        self._size = config.ssd_cache_bytes
        self._start_s = ANSWER_S if is_restart else START_S
        self._fingerprint = fingerprint(config)
        model = re.sub(r"[^\w.-]", "_", Path(config.model_path).name) or config.model.architecture
        self._folder = Path(config.ssd_cache_dir) / f"{model}-{self._fingerprint[:16]}"
        is_shared = self._folder.parent.name == f"engine-{config.data_parallel_rank}"  # the first engine starts alone
        self._shared = self._folder.parents[is_shared::-1]
        """The folder of --ssd-cache-dir, and that of this engine if there are several."""
        ranks = range(config.tensor_parallel_size)
        self.paths = [self._folder / f"rank-{rank}-of-{len(ranks)}.pages" for rank in ranks]
        self.num_pages = self.forgotten = 0
        self._page_bytes: list[int] = []
        self._files: list[int] = []
        self._lock: list[int] = []
        self._at_start(self._check)

    def open(self, page_bytes: Sequence[int]) -> None:
        """Open the files, and create or resize them if needed.

        Args:
            page_bytes: that of each rank, as in Ready.

        Raises:
            ConfigError: as in the constructor.
        """
        self._page_bytes = list(page_bytes)
        self.num_pages = self._size // sum(page_bytes)
        if self.num_pages < 2:
            raise ConfigError(
                f"--ssd-cache-bytes must be at least {2 * sum(page_bytes)}, two pages of all ranks (got {self._size})"
            )
        self._at_start(self._open_all)
        size = self.num_pages * sum(page_bytes)
        log.info("opened the disk cache", folder=self._folder, pages=self.num_pages, bytes=size)

    def forget(self, generation: int) -> None:
        """Write that contents up to this generation must not be found. Returns when it is on the disk."""
        self.forgotten = generation
        self._overwrite(partial(self._describe_all, self._files, generation))

    def wipe(self, pages: Sequence[int]) -> None:
        """Overwrite the headers of these pages of all ranks, whose contents must not be found."""
        self._overwrite(partial(self._wipe, self._files, pages))

    def close(self) -> None:
        for file in [*self._files, *self._lock]:
            os.close(file)
        self._files, self._lock = [], []

    # ---- accesses that are given up when the disk does not answer

    def _at_start(self, access: Callable[[], None]) -> None:
        try:
            self._wait_for(access, self._start_s)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"--ssd-cache-dir: {error.filename or self._folder} cannot be used: {error.strerror}: choose another "
                f"folder, or make it writable with room for {self._size} bytes"
            ) from None
        except BaseException:
            self.close()
            raise

    def _overwrite(self, access: Callable[[], None]) -> None:
        """Write to the files, or remove them, because contents that must not be found again are left in them."""
        if not self._files:
            return
        try:
            self._wait_for(access, ANSWER_S)
        except OSError as error:
            log.error(
                "the disk cache cannot be written; removing its files", folder=self._folder, reason=error.strerror
            )
            self._files = []
            try:
                self._wait_for(self._remove, ANSWER_S)
            except OSError as failure:
                reason = failure.strerror
                log.error("remove this folder, its contents must not be used", folder=self._folder, reason=reason)

    def _wait_for(self, access: Callable[[], None], seconds: float) -> None:
        """Run ``access`` in a thread. Raises OSError, also if the disk does not answer: then files stay open for it."""
        ended: Future[None] = Future()

        def run() -> None:
            try:
                access()
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)

        # A call into a disk that does not answer cannot be interrupted. The thread is left behind with its open files,
        # which must then not be closed: another file could get their numbers.
        Thread(target=run, name="disk folder", daemon=True).start()
        try:
            ended.result(seconds)
        except TimeoutError:
            self._files, self._lock = [], []
            raise OSError(errno.ETIMEDOUT, f"the disk does not answer within {seconds:g} s") from None

    # ---- the accesses

    def _check(self) -> None:
        """Lock the folder, and check its files and its room."""
        for folder in (*self._shared, self._folder):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700, parents=True)
            forbidden = 0o077 if folder == self._folder else 0o022
            require_private("--ssd-cache-dir", folder, stat.S_ISDIR, PRIVATE, forbidden)
        self._lock = [_open(self._folder / "lock", os.O_CREAT)]
        try:
            # A lock of the kernel and not a file with a process id: it is gone with the process, however that ends.
            fcntl.flock(self._lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--ssd-cache-dir: another engine uses {self._folder}: stop it, or choose another folder"
            ) from None
        disk = os.statvfs(self._folder)
        room = disk.f_bavail * disk.f_frsize
        for path in self.paths:
            if path.exists():
                file = _open(path)
                try:
                    found = self._read(path, file)
                    room += os.fstat(file).st_blocks * 512 + (0 if found is None else found.page_bytes)
                finally:
                    os.close(file)
        if room < self._size:
            raise ConfigError(
                f"--ssd-cache-bytes must be at most {room}, the room in {self._folder} (got {self._size})"
            )

    def _open_all(self) -> None:
        found = [self._open(path, size) for path, size in zip(self.paths, self._page_bytes, strict=True)]
        self.forgotten = max(found)
        if min(found) < self.forgotten:
            self._describe_all(self._files, self.forgotten)

    def _open(self, path: Path, page_bytes: int) -> int:
        """Open and resize a file, or create it. Returns up to which generation its contents are forgotten."""
        if not path.exists():
            self._create(path, page_bytes)
        file = _open(path)
        self._files.append(file)
        found = self._read(path, file)
        forgotten = 0 if found is None else found.forgotten
        is_kept = found is not None and found.page_bytes == page_bytes
        if not is_kept:
            log.warning("a disk cache is damaged or has pages of another size; its contents are dropped", path=path)
            os.ftruncate(file, SECTOR)  # it still begins with MAGIC, if this process ends here
        _resize(file, self.num_pages * page_bytes)
        if not is_kept:
            self._describe(file, page_bytes, forgotten)
        return forgotten

    def _create(self, path: Path, page_bytes: int) -> None:
        new = path.with_suffix(".new")
        new.unlink(missing_ok=True)  # of an engine that ended here
        file = _open(new, os.O_CREAT | os.O_EXCL)
        try:
            _resize(file, self.num_pages * page_bytes)
            self._describe(file, page_bytes, 0)
            # A file gets its final name when it has its description, so that a file with that name is either complete
            # or of others.
            new.rename(path)
        except BaseException:
            new.unlink()
            raise
        finally:
            os.close(file)

    def _read(self, path: Path, file: int) -> Description | None:
        """Return the description, or None if it is damaged. Raises ConfigError for files of others."""
        begin, _, rest = os.pread(file, SECTOR, 0).partition(MAGIC)
        if begin or not rest:
            raise ConfigError(f"--ssd-cache-dir: {path} is not a file of Quire: remove it, or choose another folder")
        body, _, rest = rest.partition(b"\n")
        try:
            if int(rest[:8], 16) != crc32(body):
                return None
            found = msgspec.json.decode(body, type=Description)
        except ValueError:
            return None
        # The name of the folder contains the fingerprint, so this can only happen by hand. Its contents may be
        # valuable; the operator decides.
        if (found.format, found.fingerprint) != (FORMAT, self._fingerprint):
            raise ConfigError(
                f"--ssd-cache-dir: {path} belongs to another model or configuration, so its folder was renamed: rename "
                f"it back, or remove it"
            )
        return found

    def _describe_all(self, files: Sequence[int], forgotten: int) -> None:
        for file, size in zip(files, self._page_bytes, strict=True):
            self._describe(file, size, forgotten)

    def _describe(self, file: int, page_bytes: int, forgotten: int) -> None:
        body = msgspec.json.encode(Description(FORMAT, self._fingerprint, page_bytes, forgotten))
        os.pwrite(file, (MAGIC + body + b"\n%08x\n" % crc32(body)).ljust(SECTOR, b"\0"), 0)
        # This is the only write that must have reached the disk when the call returns: it says which contents may not
        # be found.
        os.fsync(file)

    def _wipe(self, files: Sequence[int], pages: Sequence[int]) -> None:
        for file, size in zip(files, self._page_bytes, strict=True):
            for page in pages:
                os.pwrite(file, bytes(SECTOR), page * size)
            os.fdatasync(file)

    def _remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)


def _open(path: Path, flags: int = 0) -> int:
    """Open a file of this folder, and no other through a link."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _resize(file: int, size: int) -> None:
    """Give a file its size, with all its bytes allocated."""
    if os.fstat(file).st_size > size:
        os.ftruncate(file, size)
    # A sparse file would promise room that another program may take: a write would fail later, in the middle of
    # serving.
    os.posix_fallocate(file, 0, size)
