"""Sizes with a suffix, such as 32k and 4GiB, for settings that count tokens or bytes."""

import re
from decimal import Decimal

from quire.protocol.errors import ConfigError, printable

FACTORS = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
FACTORS |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}
"""Lower-case suffixes are decimal and upper-case ones binary, as in vLLM."""
SIZE = re.compile(r"(-?\d{1,30}(?:_\d{1,9}){,9})|(\d{1,30}(?:\.\d{1,30})?)([kmgtKMGT])((?<=[KMGT])iB)?", re.ASCII)
FORMS = {
    "tokens": "a number of tokens such as 32768, 32k (32,000) or 32K (32,768)",
    "bytes": "a number of bytes such as 4294967296, 4GiB, 4G (4GiB) or 4g (4,000,000,000)",
}


def parse_size(text: str, unit: str) -> int:
    """Return the number that a text means; a fraction of a token or byte is dropped.

    Args:
        unit: a key of ``FORMS``.

    Raises:
        ConfigError: the text is not a size; the message has the allowed forms, and not the setting's name.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None or (found[4] and unit != "bytes"):
        raise ConfigError(f"must be {FORMS[unit]} (got {printable(text)})")
    return int(found[1]) if found[1] else int(Decimal(found[2]) * FACTORS[found[3]])
