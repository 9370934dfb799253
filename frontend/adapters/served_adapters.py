"""The adapters that clients of one front end may name as their model."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.frontend.adapters.names import MAX_NAMES, NamedAdapter, NameTable, name_problem
from quire.frontend.adapters.reader import AdapterReader
from quire.protocol.errors import InvalidRequest, printable
from quire.protocol.model.adapter_config import AdapterError
from quire.protocol.wire.adapter_messages import AdapterRef

MAX_LISTED = 10_000
"""Folders of ``--lora-dir`` that a list of models names."""
MAX_PATH_CHARS = 4096
NUM_LOOKS = 4
"""Look-ups of files at a time, which are short on a disk that answers."""
NUM_READS = 2
"""Adapters that are read at a time: each is in memory as a whole until it is checked."""

T = TypeVar("T")


class ServedAdapters:
    """Finds the adapter of a name: in the table of the server, or as a folder of ``--lora-dir``.

    A name of the table stands for the content that was loaded. A folder of ``--lora-dir`` stands for what is in it when
    a request arrives. Files are read and hashed in threads: only requests that need their outcome wait for it.
    """

    def __init__(self, reader: AdapterReader, table: NameTable, folder: Path | None = None) -> None:
        self._reader = reader
        self._table = table
        self._folder = folder
        self._looks = ThreadPoolExecutor(NUM_LOOKS, "adapters")
        self._reads = ThreadPoolExecutor(NUM_READS, "reading adapters")
        self._changes = ThreadPoolExecutor(1, "names of adapters")
        self._reading: dict[Path, asyncio.Future[NamedAdapter]] = {}

    def may_have(self, name: str) -> bool:
        """Return False if no adapter has this name. True: ``find`` decides. Opens no slow disk; thread-safe."""
        return name in self._table.names() or (self._folder is not None and _is_folder_name(name))

    async def find(self, name: str, field: str = "model") -> AdapterRef:
        """Return the adapter that a request names in this field.

        Raises:
            InvalidRequest: ``model_not_found``, or ``invalid_adapter`` with the reason.
        """
        known = self._table.names().get(name)
        if known is None:
            known = await self._in_folder(name, field)
        return AdapterRef(name, known.digest, known.path)

    async def listed(self) -> list[NamedAdapter]:
        """Return the adapters by name, those of ``--lora-dir`` with what is known without reading them."""
        names = self._table.names()
        found = [] if self._folder is None else await self._in_thread(lambda: self._folders(names))
        return [*names.values(), *found]

    async def load(self, name: str, path: str, *, replace: bool) -> NamedAdapter:
        """Give a name to the adapter in a folder, for all front ends, and return it.

        Args:
            replace: the name may stand for another content until now. Requests in flight keep the old one.

        Raises:
            InvalidRequest: the name cannot be used or stands for another content (``adapter_exists``), the folder does
                not exist (``adapter_not_found``), or the adapter cannot be used (``invalid_adapter``).
        """
        if problem := name_problem(name):
            raise InvalidRequest(problem, "lora_name")
        if not path or len(path) > MAX_PATH_CHARS or not path.isprintable():
            text = f"lora_path must have 1 to {MAX_PATH_CHARS} printable characters (got {printable(path)})"
            raise InvalidRequest(text, "lora_path")
        folder = Path(path).absolute()
        try:
            read = await self._read(folder)
        except FileNotFoundError:
            text = f"lora_path must be a folder on the server's machine (got {printable(path)})"
            raise InvalidRequest(text, "lora_path", "adapter_not_found") from None
        except AdapterError as error:
            raise _invalid(error, folder, name, "lora_path") from None
        loaded = msgspec.structs.replace(read, name=name, created=int(time.time()))

        def add(names: dict[str, NamedAdapter]) -> None:
            before = names.get(name)
            if before is not None and before.digest != loaded.digest and not replace:
                text = f"an adapter with the name {printable(name)} and another content is loaded: unload it first, or "
                raise InvalidRequest(f"{text}send load_inplace true", "lora_name", "adapter_exists")
            if before is None and len(names) >= MAX_NAMES:
                text = f"at most {MAX_NAMES} adapters may be loaded by name: unload one, or use --lora-dir"
                raise InvalidRequest(text, "lora_name", "unsupported_value")
            names[name] = loaded

        await self._change(add)
        return loaded

    async def forget(self, name: str) -> None:
        """Remove a name from the table, for all front ends. No effect if the table has no such name."""

        def remove(names: dict[str, NamedAdapter]) -> None:
            names.pop(name, None)

        await self._change(remove)

    async def _in_folder(self, name: str, field: str) -> NamedAdapter:
        if self._folder is None or not _is_folder_name(name):
            raise _unknown(name, field)
        folder = self._folder / name
        try:
            return await self._read(folder)
        except FileNotFoundError:
            raise _unknown(name, field) from None
        except AdapterError as error:
            raise _invalid(error, folder, name, field) from None

    async def _read(self, folder: Path) -> NamedAdapter:
        known = await self._in_thread(lambda: self._reader.known(folder))
        if known is not None:
            return known
        reading = self._reading.get(folder)
        if reading is None:
            reading = asyncio.get_running_loop().run_in_executor(self._reads, self._reader.read, folder)
            self._reading[folder] = reading
            reading.add_done_callback(lambda done: self._end_read(folder, done))
        return await asyncio.shield(reading)  # the client of one request may disconnect while others wait

    def _end_read(self, folder: Path, reading: asyncio.Future[NamedAdapter]) -> None:
        del self._reading[folder]
        if not reading.cancelled():
            reading.exception()  # every request that waited may have been cancelled

    def _folders(self, names: dict[str, NamedAdapter]) -> list[NamedAdapter]:
        assert self._folder is not None
        try:
            found = sorted(each.name for each in self._folder.iterdir() if each.is_dir())
        except OSError:
            return []
        known = [name for name in found if name not in names and _is_folder_name(name)]
        return [
            NamedAdapter(name=name, path=str(self._folder / name), digest=b"", rank=0, num_bytes=0)
            for name in known[:MAX_LISTED]
        ]

    async def _change(self, edit: Callable[[dict[str, NamedAdapter]], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._changes, self._table.change, edit)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._looks, work)


def _is_folder_name(name: str) -> bool:
    """Return whether a name is that of an entry of ``--lora-dir``. One with / would lead below it or out of it."""
    return "/" not in name and not name_problem(name)


def _invalid(error: AdapterError, folder: Path, name: str, param: str) -> InvalidRequest:
    """Return the error for a client, which has the adapter's name in place of its folder."""
    return InvalidRequest(str(error).replace(str(folder), name), param, "invalid_adapter")


def _unknown(name: str, field: str) -> InvalidRequest:
    kind = "model" if field == "model" else "adapter"
    return InvalidRequest(f"the {kind} {printable(name)} does not exist", field, "model_not_found")
