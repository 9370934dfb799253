"""Requests and layouts for tests of the KV cache, without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from quire.bench.measure.shapes import find_shape
from quire.protocol.model.kv_layout import KVGroup, KVLayout, kv_layout
from quire.scheduler_proc.kv.coordinator import GroupBlocks
from quire.scheduler_proc.kv.manager import KVCacheManager


def full(size: int = 4) -> KVGroup:
    return KVGroup("full_attention", size, [0])


def sliding(window: int, size: int = 4) -> KVGroup:
    return KVGroup("sliding_window", size, [0], window)


def chunked(chunk: int, size: int = 4) -> KVGroup:
    return KVGroup("chunked_local", size, [0], chunk)


def layout_of(*groups: KVGroup) -> KVLayout:
    return KVLayout(list(groups), num_kv_heads=1, head_dim=4, dtype="float32")


def hashes_of(tokens: Sequence[int], size: int, salt: str = "") -> list[bytes]:
    """Return hashes of all full units of ``size`` tokens, each over all tokens up to its end."""
    running = sha256(repr(salt).encode())
    found: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        running.update(repr(tokens[end - size : end]).encode())
        found.append(running.digest())
    return found


@dataclass
class CacheCase:
    """A CacheRequest whose counts the test sets. ``size``: the manager's ``block_size``."""

    handle: int
    tokens: list[int]
    size: int = 4
    num_computed_tokens: int = 0
    num_acknowledged_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    account: int = 0
    salt: str = ""

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes_of(self.tokens, self.size, self.salt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def case(handle: int, num_tokens: int, size: int = 4) -> CacheCase:
    """Return a request of tokens 0, 1, 2, ...: all such requests share prefixes."""
    return CacheCase(handle, list(range(num_tokens)), size)


def step(kv: KVCacheManager, request: CacheCase, num_tokens: int, *, answered: bool = True) -> GroupBlocks | None:
    """Compute ``num_tokens`` more, cached ones first if the request has no blocks; None when the pool has too few
    blocks."""
    hits, num_hits = None, 0
    if request.num_computed_tokens == 0:
        hits, num_hits = kv.get_computed_blocks(request)
    new = kv.allocate_slots(request, num_tokens, hits, num_hits)
    if new is not None:
        kv.cache_blocks(request, min(request.num_computed_tokens + num_hits + num_tokens, request.num_tokens))
        request.num_computed_tokens += num_hits + num_tokens
        request.num_acknowledged_tokens = request.num_computed_tokens if answered else num_hits
    kv.check()
    return new


def shape(kv: KVCacheManager, request: CacheCase, group: int = 0) -> str:
    """Return the request's entries in a group: ``.`` for the null block, ``#`` for any other."""
    return "".join(".#"[block_id > 0] for block_id in kv.block_ids(request)[group].tolist())


def picture(kv: KVCacheManager) -> object:
    """Return all state that can change."""
    managers = kv.coordinator.managers
    return (
        [(b.block_id, b.ref_cnt, b.block_hash) for b in kv.pool.blocks],
        [b.block_id for b in kv.pool.free_block_queue.blocks()],
        [({k: list(v) for k, v in m.req_to_blocks.items()}, dict(m.num_cached_block)) for m in managers],
        kv.pool.cached_block_hash_to_block.blocks(),
    )


LAYOUTS = {
    "full": ("llama-3.1-8b", 0),
    "one window": ("mistral-7b", 0),
    "two groups": ("gpt-oss-20b", 0),
    "seven groups": ("gemma-3-1b", 0),
    "shared KV": ("gemma-3-1b", 8),
}
"""Models, and the number of their last layers that read the caches of earlier ones."""


def layout_like(name: str, window: int, block_size: int) -> KVLayout:
    """Return the layout of one of LAYOUTS with another window."""
    shape, num_shared = LAYOUTS[name]
    model = find_shape(shape)
    owners = [layer % 6 if layer >= model.num_layers - num_shared else layer for layer in range(model.num_layers)]
    windows = [each and window for each in model.windows]
    return kv_layout(msgspec.structs.replace(model, windows=windows, cache_sources=owners), block_size, "bfloat16")
