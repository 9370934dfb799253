"""Items of a prompt besides its tokens: where they come from, and what the front end has of them once they are read."""

from binascii import a2b_base64
from dataclasses import dataclass, field

import msgspec

from quire.frontend.images.refused import Refused


@dataclass(frozen=True)
class ImageSource:
    """An image as a request has it.

    Attributes:
        where: the field, for errors, such as ``messages[0].content[1].image_url.url``.
        url: ``data:image/...;base64,...``, ``https://...`` or ``http://...``. Base64 in a field of its own, and images
            of PIL, become data URLs, which are decoded where the limits are known.
        detail: OpenAI's field, which has no effect: the model's processor decides how many tokens an image takes.
    """

    where: str
    url: str = field(repr=False)
    detail: str = "auto"


class StoredItem(msgspec.Struct, frozen=True, eq=False, weakref=True, kw_only=True):
    """An image that the model's processor has prepared, or embeddings that a client gave. Its file exists as long as
    this object is referenced.

    Attributes:
        digest: SHA-256: of the pixels, their size and mode, and the processor with its settings; or of dtype, shape and
            bytes of embeddings.
        path: safetensors file in shared memory with the tensors of the processor, under its names, for one image; or
            with one tensor ``rows`` ``[num_rows, hidden_size]``: float32, float16 or bfloat16.
        num_rows: positions that take a row. In the text of an image, those of the model's image token.
        num_bytes: size of the file.
        kind: as of ``InputItem``. What follows is of images only.
        placeholder: text by which a chat template writes an image (``image_token`` of the processor).
        expansion: text that takes the place of the placeholder.
        grid: patches in time, height and width, if the processor gives them.
    """

    digest: bytes
    path: str
    num_rows: int
    num_bytes: int
    kind: str = "image"
    placeholder: str = ""
    expansion: str = ""
    grid: tuple[int, ...] = ()


def check_base64(num_chars: int, max_bytes: int) -> None:
    """Raises Refused if base64 of so many characters stands for too many bytes."""
    if num_chars > (max_bytes + 2) // 3 * 4:
        raise Refused(f"must have at most {max_bytes} bytes (got about {num_chars * 3 // 4})")


def decode_base64(text: str | bytes) -> bytes:
    """Return the bytes of standard base64. Raises Refused: anything else."""
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:
        raise Refused("must have standard base64 with padding") from None
