"""Tile sizes of the attention kernels: queries and keys per Triton program, by head size, dtype and GPU.

A *lane* is one query vector: one query head of one token. The lanes of a KV head are the query heads that share it,
for each token.
"""

from dataclasses import dataclass
from typing import Literal

import torch

KEY_ALIGN = 128
"""A row's keys are cut at multiples of this number. Every ``Tiles.keys`` divides it."""

Regime = Literal["decode", "prefill", "fixed"]
"""decode: few queries per row, whose keys may be cut into pieces. prefill: many queries per row. fixed: both with the
same constants, so that a query runs the same compiled code in every batch."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's heads and the dtype of its queries; a plan is made per shape.

    Attributes:
        value_dim: values are the last ``value_dim`` numbers of the keys; 0: separate, and as wide as keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    value_dim: int = 0

    @property
    def out_dim(self) -> int:
        """Dimensions of a value, and of a query's result."""
        return self.value_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one Triton program.

    Attributes:
        lanes: lanes (query vectors) of the program.
        keys: keys per tile.
        warps: warps of the program.
        stages: tiles of keys in flight.
    """

    lanes: int
    keys: int
    warps: int
    stages: int


# Keys: (minimum capability, bytes of a query's element, maximum head_dim); the first entry that matches is used. Tensor
# cores need at least 16 in every dimension. Beyond that, the sizes are the largest number of keys in flight that leaves
# room for two programs per multiprocessor, and the largest number of lanes without register spills. Exact float32
# products are computed outside the tensor cores and need more registers.
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
"""Of values; of latents only this part of a key counts."""


def tiles_of(shape: AttentionShape, regime: Regime, tile_tokens: int, capability: int) -> Tiles:
    """Return the tile sizes for ``tile_tokens`` tokens of one row; ``capability`` is 90 for compute capability 9.0."""
    size = shape.dtype.itemsize
    found = next(
        tiles
        for (min_capability, width, max_dims), tiles in TABLES[regime].items()
        if capability >= min_capability and size == width and shape.out_dim <= max_dims
    )
    if regime == "fixed":
        return found
    lanes = min(found.lanes, max(16, next_power_of_two(shape.group * tile_tokens)))
    few = lanes < found.lanes and size == 2
    return Tiles(lanes, found.keys, 4 if few else found.warps, found.stages)


def lane_chunks(shape: AttentionShape, tiles: Tiles, tile_tokens: int) -> int:
    """Return the number of Triton programs that compute the lanes of one KV head for ``tile_tokens`` tokens."""
    return -(-shape.group * tile_tokens // tiles.lanes)


def device_capability(device: torch.device) -> int:
    """Return 90 for compute capability 9.0, or 0 without a GPU, which selects the entries that fit every device."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch_options(tiles: Tiles) -> dict[str, int]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
