"""Items of a prompt besides its tokens: where they come from, and what the front end has of them once they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt


@dataclass(frozen=True)
class ImageSource:
    """An image as a request has it: ``data``, or ``url`` where there is no data.

    Attributes:
        where: the field, for errors, such as ``messages[0].content[1].image_url.url``.
        data: bytes of a file (PNG, JPEG, WebP, GIF or BMP).
        url: ``data:image/...;base64,...``, ``https://...`` or ``http://...``. Base64 in a field of its own becomes a
            data URL, which is decoded where the limits are known.
    """

    where: str
    data: bytes | None = field(default=None, repr=False)
    url: str = field(default="", repr=False)


@dataclass(frozen=True, eq=False)
class StoredImage:
    """An image that the model's processor has prepared. Its file exists as long as this object is referenced.

    Attributes:
        digest: SHA-256 of the pixels, their size and mode, and the processor with its settings.
        path: safetensors file in shared memory with the tensors of the processor, under its names, for one image.
        expansion: text that takes the place of the template's placeholder.
        num_rows: positions in ``expansion`` that take a row of the image: tokens with the model's image token id.
        grid: patches in time, height and width, if the processor gives them.
        width, height: pixels of the image as the client sent it, upright.
        num_bytes: size of the file.
        placeholder: text by which a chat template writes an image (``image_token`` of the processor), which
            ``expansion`` replaces.
    """

    digest: bytes
    path: str
    expansion: str
    num_rows: int
    grid: tuple[int, ...]
    width: int
    height: int
    num_bytes: int
    placeholder: str


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Embeddings that a client gave. The file exists as long as this object is referenced.

    Attributes:
        digest: SHA-256 of dtype, shape and bytes.
        path: safetensors file in shared memory with one tensor ``rows`` ``[num_rows, hidden_size]``: float32, float16
            or bfloat16.
        num_bytes: size of the file.
    """

    digest: bytes
    path: str
    num_rows: int
    num_bytes: int


class ImageReader(Protocol):
    """Reads the images of requests. Thread-safe."""

    async def read(self, sources: Sequence[ImageSource]) -> list[StoredImage]:
        """Return the images in order. They are fetched, decoded and processed beside the event loop.

        Raises:
            InvalidRequest: one cannot be used, or the server is too busy (code ``queue_full``). It names the field.
        """

    def read_now(self, sources: Sequence[ImageSource]) -> list[StoredImage]:
        """Do the same, but block this thread."""

    def close(self) -> None:
        """Stop the helpers. Stored images stay."""


class RowsReader(Protocol):
    """Reads prompts given as embeddings. Both methods raise InvalidRequest, which names the field ``where``."""

    def read(self, where: str, value: object) -> StoredRows:
        """Return the embeddings of a field of JSON."""

    def keep(self, where: str, rows: npt.NDArray[Any]) -> StoredRows:
        """Return the embeddings of an array ``[n, hidden_size]`` of float32 or float16."""
