"""Parts of messages that are images, in the forms of all APIs."""

import io
import sys
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.frontend.images.reader import ImageReader
from quire.frontend.images.source import ImageSource, StoredItem
from quire.protocol.errors import InvalidRequest, wrong_value

IMAGE_KINDS = ("image_url", "input_image", "image", "image_pil")
"""Types of parts: of chat, of Responses, of Messages and transformers, and of vLLM's offline API."""
DETAILS = ("auto", "low", "high", "original")
URL_FORM = 'a string, "data:image/...;base64,..." or "https://..."'


@dataclass(frozen=True, slots=True)
class PartAt:
    """A part of another API's message that is passed to chat as it is, with its path in the client's body."""

    where: str
    part: Mapping[str, Any]


@dataclass(slots=True)
class MessageImages:
    """The images of the messages of one request, in order.

    Attributes:
        sources: all of them; emptied once they are read, because they may be large.
        stored: those that are read; before that, the first ones, if a stored response has them.
    """

    sources: list[ImageSource] = field(default_factory=list)
    stored: list[StoredItem] = field(default_factory=list)

    async def read(self, reader: ImageReader | None) -> None:
        """Read those that are not stored. Raises InvalidRequest as ``ImageReader.read``."""
        if reader is not None and self.sources:
            self.stored = [*self.stored, *await reader.read(self.sources[len(self.stored) :])]
            self.sources.clear()

    @property
    def num_rows(self) -> int:
        return sum(image.num_rows for image in self.stored)


def image_source(part: Mapping[str, Any], where: str) -> ImageSource:
    """Return the image of a part with a type of IMAGE_KINDS.

    Raises:
        InvalidRequest: the part has no image, or names a file that only another server has.
    """
    kind = part["type"]
    if "source" in part:
        return _of_block(part["source"], f"{where}.source")
    name = "url" if kind == "image" and "url" in part else "image_url" if kind == "input_image" else kind
    value, place = part.get(name), f"{where}.{name}"
    detail, holder = part.get("detail"), where
    if isinstance(value, Mapping):
        detail, holder = value.get("detail", detail), place
        value, place = value.get("url"), f"{place}.url"
    detail = "auto" if detail is None else detail
    if detail not in DETAILS:
        raise wrong_value(f"{holder}.detail", f"one of {', '.join(DETAILS)}", detail)
    if part.get("file_id") is not None:
        text = f"{where}.file_id is not supported: this server stores no files; send a data URL"
        raise InvalidRequest(text, f"{where}.file_id", "unsupported")
    if isinstance(value, str):
        return ImageSource(place, value, detail)
    return ImageSource(place, _png(value, place), detail)


def _of_block(source: Any, where: str) -> ImageSource:
    """Return the image of Anthropic's ``source``."""
    fields: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
    match fields:
        case {"type": "url", "url": str(url)}:
            return ImageSource(f"{where}.url", url)
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return ImageSource(f"{where}.data", f"data:{media_type};base64,{data}")
        case {"type": "base64"}:
            name = "data" if isinstance(fields.get("media_type"), str) else "media_type"
            raise wrong_value(f"{where}.{name}", "a string", fields.get(name), "invalid_type")
    raise wrong_value(f"{where}.type", "base64 or url", fields.get("type"), "unsupported")


def _png(value: Any, where: str) -> str:
    """Return an image of PIL as a data URL, upright and in RGB, which is what transformers makes of it."""
    module = sys.modules.get("PIL.Image")  # an image exists only where it was imported
    if module is None or not isinstance(value, module.Image):
        raise wrong_value(where, URL_FORM, value)
    from PIL import ImageOps

    made = io.BytesIO()
    try:
        ImageOps.exif_transpose(value).convert("RGB").save(made, "PNG", compress_level=1)
    except (OSError, ValueError, SyntaxError, AttributeError):  # the file behind it is damaged or closed
        raise InvalidRequest(f"{where} cannot be read as an image", where) from None
    return f"data:image/png;base64,{b64encode(made.getvalue()).decode()}"


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS
