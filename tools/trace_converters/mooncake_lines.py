"""Writer of Mooncake's JSON lines, which ``quire replay`` reads, for traces without prompt contents."""

import json
from collections.abc import Iterable
from pathlib import Path

UNIT = 512
"""Tokens per content id in this format."""


def write(path: Path, requests: Iterable[tuple[float, int, int]]) -> int:
    """Write requests of (seconds, prompt tokens, output tokens), sorted by time; return their number.

    Each content id occurs once, so no two prompts share a prefix.
    """
    first = count = 0
    with path.open("w", encoding="utf-8") as file:
        for seconds, prompt, answer in sorted(requests, key=lambda request: request[0]):
            end = first - (-prompt // UNIT)
            record = {"timestamp": round(seconds * 1e3, 3), "input_length": prompt, "output_length": answer}
            file.write(json.dumps(record | {"hash_ids": list(range(first, end))}) + "\n")
            first, count = end, count + 1
    return count
