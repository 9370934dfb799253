"""What the attention kernels are compiled for: how many queries and keys a program handles, by head size and dtype."""

from dataclasses import dataclass
from typing import Literal

import torch

KEY_ALIGN = 128
"""Every ``keys`` below divides it. Where a row's keys are cut, they are cut at multiples of it."""

Regime = Literal["decode", "prefill", "fixed"]
"""decode: a row has few queries, its keys may be cut. prefill: many queries of one row. fixed: both with the same
constants, so that a query goes through the same compiled code whatever its neighbours are."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's heads, and the dtype of its queries: what a plan is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program's queries (lanes: tokens times heads of a group), keys of a tile, warps, tiles of keys in flight."""

    lanes: int
    keys: int
    warps: int
    stages: int


# By (capability from, bytes of a query's element, head_dim up to); the first that fits. A tensor core wants 16 in every
# dimension. Above that: the most keys in flight that leave room for two programs on a processor, and the most lanes
# with which nothing spills from registers. Exact float32 products are made outside the tensor cores, which takes more.
DECODE = {
    (90, 2, 64): Tiles(64, 128, 4, 3),
    (90, 2, 128): Tiles(64, 64, 4, 3),
    (90, 2, 256): Tiles(32, 32, 4, 3),
    (0, 2, 64): Tiles(64, 64, 4, 3),
    (0, 2, 128): Tiles(64, 64, 4, 2),
    (0, 2, 256): Tiles(32, 32, 4, 2),
    (0, 2, 512): Tiles(16, 16, 4, 2),
    (0, 4, 64): Tiles(32, 32, 8, 2),
    (0, 4, 128): Tiles(16, 16, 8, 2),
    (0, 4, 512): Tiles(16, 16, 8, 2),
}
PREFILL = {
    (0, 2, 64): Tiles(128, 64, 4, 3),
    (90, 2, 128): Tiles(128, 64, 8, 2),
    (0, 2, 128): Tiles(128, 32, 8, 2),
    (0, 2, 256): Tiles(64, 32, 8, 2),
    (0, 2, 512): Tiles(16, 16, 4, 2),
    (0, 4, 64): Tiles(64, 32, 8, 2),
    (0, 4, 128): Tiles(32, 16, 8, 2),
    (0, 4, 512): Tiles(16, 16, 8, 2),
}
FIXED = {
    (0, 2, 128): Tiles(64, 64, 8, 2),
    (0, 2, 256): Tiles(32, 32, 8, 2),
    (0, 2, 512): Tiles(16, 16, 8, 2),
    (0, 4, 64): Tiles(32, 32, 8, 2),
    (0, 4, 512): Tiles(16, 16, 8, 2),
}
TABLES = {"decode": DECODE, "prefill": PREFILL, "fixed": FIXED}

MAX_HEAD_DIM = 512


def tiles_of(shape: AttentionShape, regime: Regime, tile_tokens: int, capability: int) -> Tiles:
    """The tiles for ``tile_tokens`` tokens of one row; ``capability`` is 90 for compute capability 9.0."""
    size = shape.dtype.itemsize
    found = next(
        tiles
        for (since, width, most_dims), tiles in TABLES[regime].items()
        if capability >= since and size == width and shape.head_dim <= most_dims
    )
    if regime == "fixed":
        return found
    lanes = min(found.lanes, max(16, next_power_of_two(shape.group * tile_tokens)))
    few = lanes < found.lanes and size == 2
    return Tiles(lanes, found.keys, 4 if few else found.warps, found.stages)


def lane_chunks(shape: AttentionShape, tiles: Tiles, tile_tokens: int) -> int:
    """Programs that share the lanes of ``tile_tokens`` tokens and one KV head."""
    return -(-shape.group * tile_tokens // tiles.lanes)


def device_capability(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 where there is none, which takes the rows that suit every device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch_options(tiles: Tiles) -> dict[str, int]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
