"""Text of a request that looks like a special token, as opposed to the special tokens that a chat template writes.

A conversation with such text is rendered twice. The first rendering is the prompt. The second has marks around the
text, which show where it went; they stay out of the first, because a template compares and trims strings.
"""

import re
from collections.abc import Iterable
from typing import Any

# Private-use characters around text of users that looks like a special token; see mark_special.
MARK_START, MARK_END = "\ue0f0", "\ue0f1"
# A template that prints a whole object, or JSON in ASCII, escapes the marks.
ESCAPED_MARK = re.compile(r"\\+u(e0f[01])", re.IGNORECASE)


def special_pattern(special_tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any special token, the longest first, or None without special tokens."""
    contents = sorted((token for token in special_tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents))) if contents else None


def written_end(rendered: str, most: int = 256) -> str:
    """Return the last characters of a rendered conversation, after the last marked text in them."""
    return re.split(f"[{MARK_START}{MARK_END}]", rendered[-most:])[-1]


def mark_special(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """Return ``value`` with marks around each special token in its strings; marks that it already has are removed.

    Keys are marked too, because a template writes the keys of tool parameters and of earlier calls. ``pattern``: None
    to remove marks only.
    """
    if isinstance(value, str):
        while MARK_START in value or MARK_END in value or ESCAPED_MARK.search(value):
            value = ESCAPED_MARK.sub("", value.replace(MARK_START, "").replace(MARK_END, ""))
        return value if pattern is None else pattern.sub(f"{MARK_START}\\g<0>{MARK_END}", value)
    if isinstance(value, list):
        return [mark_special(item, pattern) for item in value]
    if isinstance(value, dict):
        return {mark_special(key, pattern): mark_special(item, pattern) for key, item in value.items()}
    return value


def mark_parts(marked: list[Any], given: list[Any], pattern: re.Pattern[str]) -> None:
    """Add marks behind the texts of a message's parts if a special token would arise where they meet.

    A template may write all images before the texts, and may trim each.
    """
    texts = [part["text"] for part in given if part["type"] == "text"]
    begins = re.compile(f"(?=(?:{pattern.pattern}))")
    for parts in (texts, [text.strip() for text in texts]):
        if len(begins.findall("".join(parts))) > sum(len(begins.findall(part)) for part in parts):
            for part in marked:
                if part["type"] == "text":
                    part["text"] += MARK_START + MARK_END
            return


def with_marks(text: str, marked: str) -> str:
    """Return a rendering with marks around the text that stays plain, as a second rendering has them.

    Templates trim strings, so blanks may differ beside marks. If more differs, the marks have led the template another
    way: then the marked rendering is returned, which has no text of unknown origin.
    """
    pieces = re.split(f"([{MARK_START}{MARK_END}])", "".join(marked.split()))
    if "".join(pieces[::2]) != "".join(text.split()):
        return marked
    places = [i for i, char in enumerate(text) if not char.isspace()] if len(pieces) > 1 else []
    made: list[str] = []
    at = done = 0
    for piece in pieces:
        if piece not in (MARK_START, MARK_END):
            at += len(piece)
            continue
        is_before = piece == MARK_START and at < len(places)
        cut = max(done, places[at] if is_before else places[at - 1] + 1 if at else 0)
        made += (text[done:cut], piece)
        done = cut
    return "".join((*made, text[done:]))
