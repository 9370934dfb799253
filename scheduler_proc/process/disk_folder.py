"""The folder of the disk tier: one file of pages per rank, which outlives the engine."""

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.scheduler_proc.process.fingerprint import fingerprint

log = event_logger("scheduler")

MAGIC = b"Quire KV pages\n"
FORMAT = 1
SECTOR = 4096
"""Bytes of the description in page 0, and of the part of a page that has its header."""


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

    Attributes:
        paths: the file of each rank.
        num_pages: pages of each file, page 0 included.
        forgotten: see Description; the same in all files.
    """

    def __init__(self, config: EngineConfig, page_bytes: Sequence[int], layouts: Sequence[Sequence[bytes]]) -> None:
        """Open the files, and create or resize them if needed.

        Args:
            page_bytes, layouts: those of each rank, as in Ready.

        Raises:
            ConfigError: the files cannot be used; the message says why and what to do.
        """
        self._fingerprint = fingerprint(config, layouts)
        self._page_bytes = list(page_bytes)
        self.num_pages = config.ssd_cache_bytes // sum(page_bytes)
        if self.num_pages < 2:
            raise ConfigError(
                f"--ssd-cache-bytes must be at least {2 * sum(page_bytes)}, two pages of all ranks (got "
                f"{config.ssd_cache_bytes})"
            )
        model = re.sub(r"[^\w.-]", "_", Path(config.model_path).name) or config.model.architecture
        self._folder = Path(config.ssd_cache_dir) / f"{model}-{self._fingerprint[:16]}"
        ranks = range(len(page_bytes))
        self.paths = [self._folder / f"rank-{rank}-of-{len(page_bytes)}.pages" for rank in ranks]
        self._files: list[int] = []
        self._lock = self._make_folder()
        try:
            found = [self._open(path, size) for path, size in zip(self.paths, page_bytes, strict=True)]
            self.forgotten = max(found)
            if min(found) < self.forgotten:
                self.forget(self.forgotten)
        except BaseException:
            self.close()
            raise
        size = self.num_pages * sum(page_bytes)
        log.info("opened the disk cache", folder=self._folder, pages=self.num_pages, bytes=size)

    def forget(self, generation: int) -> None:
        """Write that contents up to this generation must not be found. Returns when it is on the disk."""
        self.forgotten = generation
        try:
            for file, size in zip(self._files, self._page_bytes, strict=True):
                self._describe(file, size, generation)
        except OSError as error:
            self._remove(error)

    def wipe(self, pages: Sequence[int]) -> None:
        """Overwrite the headers of these pages of all ranks, whose contents must not be found."""
        try:
            for file, size in zip(self._files, self._page_bytes, strict=True):
                for page in pages:
                    os.pwrite(file, bytes(SECTOR), page * size)
                os.fdatasync(file)
        except OSError as error:
            self._remove(error)

    def close(self) -> None:
        for file in [*self._files, self._lock]:
            os.close(file)
        self._files = []

    def _make_folder(self) -> int:
        """Create and lock the folder. Returns the descriptor of the lock."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(self._folder, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                f"--ssd-cache-dir: another engine uses {self._folder}: stop it, or choose another folder"
            ) from None
        return lock

    def _open(self, path: Path, page_bytes: int) -> int:
        """Open and resize a file, or create it. Returns up to which generation its contents are forgotten."""
        try:
            if not path.exists():
                self._create(path, page_bytes)
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._files.append(file)
            forgotten = self._read(path, file, page_bytes)
            if forgotten is None:
                log.warning("the description of a disk cache is damaged; its contents are dropped", path=path)
                os.ftruncate(file, 0)
            _resize(file, self.num_pages * page_bytes)
            if forgotten is None:
                self._describe(file, page_bytes, forgotten := 0)
        except OSError as error:
            raise self._unusable(path, error) from None
        return forgotten

    def _create(self, path: Path, page_bytes: int) -> None:
        new = path.with_suffix(".new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _resize(file, self.num_pages * page_bytes)
            self._describe(file, page_bytes, 0)
            new.rename(path)
        except BaseException:
            new.unlink()
            raise
        finally:
            os.close(file)

    def _read(self, path: Path, file: int, page_bytes: int) -> int | None:
        """Return the forgotten generation, or None if it cannot be read. Raises ConfigError for files of others."""
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
        expected = Description(FORMAT, self._fingerprint, page_bytes, found.forgotten)
        if found != expected:
            raise ConfigError(
                f"--ssd-cache-dir: {path} belongs to another model or configuration, so its folder was renamed: rename "
                f"it back, or remove it"
            )
        return found.forgotten

    def _describe(self, file: int, page_bytes: int, forgotten: int) -> None:
        body = msgspec.json.encode(Description(FORMAT, self._fingerprint, page_bytes, forgotten))
        os.pwrite(file, (MAGIC + body + b"\n%08x\n" % crc32(body)).ljust(SECTOR, b"\0"), 0)
        os.fsync(file)

    def _remove(self, error: OSError) -> None:
        """Remove the files, because contents that must not be found again could not be overwritten."""
        log.error("the disk cache cannot be written; its files are removed", folder=self._folder, reason=error.strerror)
        for path in self.paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as failure:
                log.error("remove this file, which has contents that must not be used", path=path, reason=failure)

    def _unusable(self, path: Path, error: OSError) -> ConfigError:
        return ConfigError(
            f"--ssd-cache-dir: {path} cannot be used: {error.strerror}: choose another folder, or make it writable "
            f"with room for {self.num_pages * sum(self._page_bytes)} bytes"
        )


def _resize(file: int, size: int) -> None:
    """Give a file its size, with all its bytes allocated."""
    if os.fstat(file).st_size > size:
        os.ftruncate(file, size)
    os.posix_fallocate(file, 0, size)
