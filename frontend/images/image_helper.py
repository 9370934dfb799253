"""Decodes and processes images in a helper process, because files of clients reach decoders written in C.

This module has both ends. A crash, an endless loop or exhausted memory in the helper costs one image. The helper is
started as ``python -P -m quire.frontend.images.image_helper`` and imports transformers, which the caller never does.
"""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.frontend.images.refused import Refused
from quire.frontend.images.source import StoredItem, decode_base64
from quire.protocol.process.cache_folder import set_compiler_folder
from quire.protocol.process.helper import Answer, Helper, HelperDied, serve
from quire.version import install_command

if TYPE_CHECKING:
    from quire.frontend.images.processing import Processor

MODULE = "quire.frontend.images.image_helper"
START_SECONDS = 300.0
"""Time for its imports, which on a busy machine take a minute."""
CPU_SECONDS = 20.0
WALL_SECONDS = 300.0
"""Wall-clock limit of one image. Beside workers that use all cores, helpers get 2 % of one, for their low priority."""
MAX_BYTES = 3 * 2**30
"""Limit of the helper's address space, in addition to what it has at start."""
NICENESS = 19
BUSY = "cannot be read now, because the server is too busy: retry later"
TOO_LARGE = "must be an image that can be decoded in bounded memory"
TOO_SLOW = "must be an image that can be decoded in bounded time"


class Hello(msgspec.Struct, frozen=True):
    """``folder``: of the checkpoint. ``token_id``: token whose positions take rows. ``max_pixels``: of an image."""

    folder: str
    token_id: int
    max_pixels: int


class ImageHelper:
    """The caller's end, for use by one thread at a time."""

    def __init__(self, hello: Hello, module: str = MODULE, cpu_seconds: float = CPU_SECONDS) -> None:
        self._helper = Helper(module, msgspec.msgpack.encode(hello), START_SECONDS)
        self._cpu_seconds = cpu_seconds
        self._problem = ""
        self.kill, self.close = self._helper.kill, self._helper.close

    def start(self) -> None:
        """Start the process if it is not running.

        Raises:
            Refused: images of this checkpoint cannot be read here.
            HelperDied: it ended.
        """
        self._problem = self._problem or self._helper.start().decode()
        if self._problem:  # then it ended, and would end again
            raise Refused(self._problem)

    def prepare(self, data: bytes, path: str) -> StoredItem:
        """Write the tensors of an image to a new file and return the rest. ``data``: its file, or its data URL.

        Raises:
            Refused: the image cannot be used, it killed the helper twice, or the helper got no CPU time.
        """
        try:
            self.start()
            answer = self._helper.ask_twice(os.fsencode(path) + b"\0", self._cpu_seconds, WALL_SECONDS, data)
        except HelperDied as died:
            if died.was_starved or died.was_killed:
                raise Refused(BUSY, is_busy=True) from None
            raise Refused(TOO_SLOW if died.took_too_long else TOO_LARGE) from None
        found = msgspec.msgpack.decode(answer, type=StoredItem | str)
        if isinstance(found, str):
            raise Refused(found, is_busy=found == BUSY)
        return found


# ---- inside the helper process


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    set_compiler_folder()
    warnings.simplefilter("ignore")  # about files of clients
    serve(_make, MAX_BYTES)


def _make(hello: bytes) -> tuple[bytes, Answer | None]:
    given = msgspec.msgpack.decode(hello, type=Hello)
    try:
        from quire.frontend.images.processing import Processor

        processor = Processor(Path(given.folder), given.token_id)
    except ImportError:
        problem = f"cannot be read: the server lacks packages for images ({install_command('vision')})"
        return problem.encode(), None
    except Refused as refused:
        return refused.text.encode(), None
    os.nice(NICENESS)  # after the imports, for which a server that starts waits
    return b"", lambda question: answer(processor, question, given.max_pixels)


def answer(processor: "Processor", question: bytes, max_pixels: int) -> bytes:
    """Return an encoded StoredItem, or why there is none, for the path of its file, a null byte, and the image."""
    path, _, data = question.partition(b"\0")
    found: StoredItem | str
    try:
        if data[:5].lower() == b"data:":
            data = decode_base64(data.partition(b",")[2])
        found = processor.prepare(data, max_pixels, os.fsdecode(path))
    except Refused as refused:
        found = refused.text
    except MemoryError:
        found = TOO_LARGE
    except OSError:  # no room for the file
        found = BUSY
    return msgspec.msgpack.encode(found)


if __name__ == "__main__":
    main()
