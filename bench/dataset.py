"""Prompts of a benchmark: random words, or a file of JSON lines, plain or compressed."""

import gzip
import json
import lzma
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from quire.protocol.errors import ConfigError

FIELDS = ("input", "prompt")
WORD_LENGTH = 5


def random_prompts(count: int, num_words: int, seed: int) -> list[str]:
    """Return prompts without a shared prefix; each has at least as many tokens as words."""
    rng = random.Random(seed)
    return [
        " ".join("".join(rng.choices(string.ascii_lowercase, k=WORD_LENGTH)) for _ in range(num_words))
        for _ in range(count)
    ]


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Return the field ``input`` or ``prompt`` of each line, without empty texts and blank lines.

    Raises:
        ConfigError: the file cannot be read, a line has no such field (names the line), or there is no prompt.
    """
    prompts: list[str] = []
    try:
        with _open(path) as lines:
            for text in _texts(lines, path):
                if limit is not None and len(prompts) >= limit:
                    break
                prompts.append(text)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"--dataset {path}: cannot read file: {reason}") from None
    if not prompts:
        raise ConfigError(f"--dataset {path}: no prompts in file")
    return prompts


def _texts(lines: IO[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"--dataset {path}: line {number} is not JSON") from None
        found = [record[name] for name in FIELDS if name in record] if isinstance(record, dict) else []
        if not found or not isinstance(found[0], str):
            raise ConfigError(f"--dataset {path}: line {number} has no string field {' or '.join(FIELDS)}")
        if found[0]:
            yield found[0]


def _open(path: Path) -> IO[str]:
    """Open the file by its suffix. Compressed files are streamed: a trace decompresses to many times its size."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")
