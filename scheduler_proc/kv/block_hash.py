"""Names for block contents: chained SHA-256 over canonical bytes.

The hash of a block covers its tokens (little-endian int32) and, through its parent, everything before it; the first
block's parent covers the cache salt. So equal hashes mean equal prefixes, in every process and on every machine, and
requests with different salts share nothing.
"""

from hashlib import sha256

import numpy as np
import numpy.typing as npt

_ROOT = b"quire block chain 1\0"


def root_hash(cache_salt: str) -> bytes:
    """The parent of a request's first block."""
    return sha256(_ROOT + cache_salt.encode()).digest()


def hash_blocks(tokens: npt.NDArray[np.int32], block_size: int, parent: bytes) -> list[bytes]:
    """Hashes of the full blocks in ``tokens``, which start at a block's edge after ``parent``."""
    data = np.ascontiguousarray(tokens, "<i4").data.cast("B")
    step = block_size * 4
    hashes: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        parent = sha256(parent + data[start : start + step]).digest()
        hashes.append(parent)
    return hashes


def group_key(block_hash: bytes, group: int) -> bytes:
    """The key of a block's content in one KV group's cache: groups keep different things of the same tokens."""
    return block_hash if group == 0 else block_hash + group.to_bytes(2, "little")
