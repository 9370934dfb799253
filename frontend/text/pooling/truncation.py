"""The first or last tokens of a text, without tokenizing all of it."""

import re
from typing import Literal, TypeAlias

from tokenizers import Encoding

from quire.frontend.text.text_in import TextIn

Side: TypeAlias = Literal["left", "right"]

CHARS_PER_TOKEN = 8
"""Length of the part that is tokenized first; each further part is GROWTH times as long."""
GROWTH = 4
WINDOW = 4096
"""Characters in which a place to cut is searched."""
# Pre-tokenizers split before a space between two words of any kind. Before a line break or a punctuation mark they do
# only between letters; an apostrophe may be inside a word, and a combining mark belongs to a letter.
CUT = re.compile(r"(?<=\S)[ \t](?=\S)|(?<=[^\W\d_])[\s.,;:!?。，、；：！？…](?=[^\W\d_])")


def first_tokens(text_in: TextIn, text: str, most: int, side: Side, param: str, *, is_plain: bool = False) -> list[int]:
    """Return the token ids of a text, at most ``most`` of them, without special tokens around it.

    A part of the text is tokenized that has more tokens than are needed. It ends between two words, and the tokens next
    to that end are not used, so that the result is that of tokenizing the whole text.

    Args:
        most: from 1.
        side: the end of the text that is cut off.
        param: field of the text, for errors.
        is_plain: special tokens in the text stay plain text.

    Raises:
        InvalidRequest: there is no tokenizer, or the text cannot be encoded.
    """
    shortened = _shortened(text_in, text, most, side, param, is_plain)
    found = text_in.encoding(text, param=param, is_plain=is_plain) if shortened is None else shortened[1]
    return cut(found.ids, most, side)


def first_part(text_in: TextIn, text: str, most: int, side: Side, param: str) -> str:
    """Return a part of the text, or all of it, with the ``first_tokens`` and more, to tokenize it in other text.

    White space at the kept end of the text is not counted, because a template may strip it.
    """
    kept = text.lstrip() if side == "right" else text.rstrip()
    found = _shortened(text_in, kept, most, side, param, is_plain=True)
    if found is None:
        return text
    num_stripped = len(text) - len(kept)
    return text[:num_stripped] + found[0] if side == "right" else found[0] + text[len(kept) :]


def _shortened(
    text_in: TextIn, text: str, most: int, side: Side, param: str, is_plain: bool
) -> tuple[str, Encoding] | None:
    """Return a part of the text with the first ``most`` tokens, and its tokens; None: all of the text is needed."""
    margin = 2 * text_in.max_token_chars
    length = CHARS_PER_TOKEN * most + margin
    while length < len(text):
        part = _part(text, length, side)
        if part:
            found = text_in.encoding(part, param=param, is_plain=is_plain)
            if _has_enough(found, most, margin, len(part), side):
                return part, found
        length *= GROWTH
    return None


def cut(ids: list[int], most: int, side: Side) -> list[int]:
    """Return the first ``most`` ids (``side`` right) or the last."""
    return ids[:most] if side == "right" else ids[-most:]


def _part(text: str, length: int, side: Side) -> str:
    """Return about ``length`` characters of the text that can be tokenized alone; "" if there is no place to cut."""
    if side == "right":
        begin = max(length - WINDOW, 0)
        *_, end = (0, *(match.start() for match in CUT.finditer(text, begin, length)))
        return text[:end]
    begin = len(text) - length
    found = CUT.search(text, begin, begin + WINDOW)
    return "" if found is None else text[found.start() :]


def _has_enough(found: Encoding, most: int, margin: int, length: int, side: Side) -> bool:
    """Whether ``most`` tokens are at least ``margin`` characters away from the end at which the text was cut."""
    if len(found) < most:
        return False
    offsets = found.offsets
    return bool(offsets[most - 1][1] <= length - margin if side == "right" else offsets[-most][0] >= margin)
