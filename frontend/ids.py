"""Ids of what one front end alone has: running requests, sessions and stored responses.

The last two digits of each are the number of that front end, so that the others find it.
"""

import re
import uuid

# At most 255 characters, since a text of a request body may be as long as the body.
_HELD = re.compile(r"[!-~]{0,239}[0-9a-f]{14}([0-9a-f]{2})")


def new_id(prefix: str, index: int, given: str = "") -> str:
    """Return a unique id. ``index``: number of this front end; ``given``: the client's own id, which it then contains.

    ``prefix`` ends with its separator.
    """
    digits = f"{uuid.uuid4().hex[:-2]}{index:02x}"
    return f"{prefix}{given}-{digits[16:]}" if given else prefix + digits


def front_end_of(held_id: str) -> int | None:
    """Return the number of the front end that has made an id, or None for another text."""
    match = _HELD.fullmatch(held_id)
    return None if match is None else int(match[1], 16)
