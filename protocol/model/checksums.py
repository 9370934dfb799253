"""Checksums that a checkpoint directory may contain: ``SHA256SUMS``, as sha256sum writes it, or ``checksums.json``."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.protocol.model.config_fields import read_json

SUMS = "SHA256SUMS"
JSON = "checksums.json"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def verify_checksums(folder: Path, files: Iterable[Path]) -> int:
    """Compare files with the directory's list of SHA-256 sums; files that are not in the list are not read.

    ``checksums.json`` is an object of file names and hex sums, with or without the prefix ``sha256:``.

    Returns:
        Number of files compared; 0 without a list.

    Raises:
        ConfigError: a sum differs, or the list cannot be read.
    """
    sums = _read_sums(folder)
    compared = 0
    for file in sorted(set(files)):
        if file.name in sums and file.is_file():
            compared += 1
            if _sha256(file) != sums[file.name].lower():
                raise ConfigError(f"{file}: SHA-256 differs from {_list_of(folder).name}: download the file again")
    return compared


def _list_of(folder: Path) -> Path:
    return folder / SUMS if (folder / SUMS).is_file() else folder / JSON


def _read_sums(folder: Path) -> dict[str, str]:
    path = _list_of(folder)
    if not path.is_file():
        return {}
    if path.name == JSON:
        sums = {name: str(value).removeprefix("sha256:") for name, value in read_json(path).items()}
        wrong = [name for name, value in sums.items() if not re.fullmatch(r"[0-9a-fA-F]{64}", value)]
        if wrong:
            raise ConfigError(f"{path}: value of {wrong[0]!r} must be a SHA-256 in hex")
        return sums
    sums = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None and line.strip():
            raise ConfigError(f"{path}: line {number} must be a SHA-256 in hex and a file name")
        if match is not None:
            sums[match[2]] = match[1]
    return sums


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
