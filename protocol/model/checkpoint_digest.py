"""Samples of the files of a checkpoint, by which two checkpoints are compared without reading them whole."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

SUFFIXES = (".safetensors", ".gguf", ".json")
CHUNK_BYTES = 2**16
NUM_CHUNKS = 8
"""Parts of a file that are read, at equal distances."""


def checkpoint_parts(path: Path, *, with_times: bool) -> Iterator[bytes]:
    """Yield names, sizes and samples of the files of a checkpoint, and the times of their last changes if wanted.

    Raises:
        OSError: a file cannot be read.
    """
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    for file in files:
        info = file.stat()
        yield f"{file.name} {info.st_size}{f' {info.st_mtime_ns}' if with_times else ''}\n".encode()
        with file.open("rb") as opened:
            for number in range(NUM_CHUNKS):
                opened.seek(info.st_size * number // NUM_CHUNKS)
                yield opened.read(CHUNK_BYTES)


def checkpoint_digest(path: Path) -> str:
    """Return 32 hexadecimal digits that are equal on two machines with copies of one checkpoint.

    Raises:
        OSError: a file cannot be read.
    """
    digest = sha256()
    for part in checkpoint_parts(path, with_times=False):
        digest.update(part)
    return digest.hexdigest()[:32]
