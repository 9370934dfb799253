"""Where the items of a prompt are: images in the text of a conversation and in its tokens, and rows that were given."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.frontend.images.source import StoredItem
from quire.frontend.text.control_text import MARK_END, MARK_START
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.item_messages import InputItem

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item of a prompt. ``ranges``: as of InputItem. Its file exists as long as this object is kept."""

    content: StoredItem
    ranges: Ranges

    @property
    def item(self) -> InputItem:
        content = self.content
        return InputItem(content.digest, list(self.ranges), content.path, content.kind, content.grid)

    def moved(self, offset: int) -> "PlacedItem":
        """Return the item behind ``offset`` further tokens."""
        return PlacedItem(self.content, tuple((begin + offset, count) for begin, count in self.ranges))


def expanded(text: str, images: Sequence[StoredItem]) -> str:
    """Return a rendered conversation with each placeholder that the template wrote replaced by its image's text.

    Between marks, a placeholder is a user's text, and stays.

    Raises:
        InvalidRequest: there are more or fewer placeholders than images.
    """
    if not images:
        return text
    user_text = f"{MARK_START}[^{MARK_START}{MARK_END}]*{MARK_END}"
    pieces = re.split(f"({user_text})|{re.escape(images[0].placeholder)}", text)
    # Every other piece is what separates two others: a user's text, or None for a placeholder.
    num_found = pieces[1::2].count(None)
    if num_found != len(images):
        raise InvalidRequest(
            f"messages have {len(images)} images, of which this model's chat template writes {num_found}: send images "
            "in the user's messages, or start the server with another --chat-template",
            "messages",
        )
    rest = iter(images)
    return "".join(next(rest).expansion if piece is None else piece for piece in pieces)


def place_images(ids: Sequence[int], images: Sequence[StoredItem], token_id: int | None) -> tuple[PlacedItem, ...]:
    """Return the images at their positions, which have the token ``token_id``. Images may follow each other directly.

    Raises:
        InvalidRequest: there are more or fewer positions than rows.
    """
    if not images:
        return ()
    places = np.flatnonzero(np.asarray(ids, np.int64) == token_id)
    ends = np.cumsum([image.num_rows for image in images])
    if len(places) != ends[-1]:
        text = f"the tokens of these messages have {len(places)} positions for the {ends[-1]} rows of their images"
        raise InvalidRequest(f"{text}: tokenizer and processor of this model disagree", "messages")
    return tuple(
        PlacedItem(image, _ranges(found)) for image, found in zip(images, np.split(places, ends[:-1]), strict=True)
    )


def _ranges(places: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Ranges:
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return tuple((int(run[0]), len(run)) for run in runs)
