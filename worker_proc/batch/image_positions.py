"""Positions of images in time, height and width (M-RoPE, arXiv 2409.12191, section 2.1)."""

from collections.abc import Sequence
from math import isqrt, prod

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.item_messages import InputItem


def merged_grid(item: InputItem) -> tuple[int, ...]:
    """Return the rows of an image in time, height and width: the tower merges squares of neighbouring patches.

    Raises:
        ValueError: the item's rows are not those of its grid, or not at consecutive positions.
    """
    (_, count), (time, height, width) = item.ranges[0], item.grid or (0, 0, 0)
    side = isqrt(prod(item.grid) // count)
    if len(item.ranges) != 1 or not side or time * (height // side) * (width // side) != count:
        raise ValueError(f"an image of {count} rows in {len(item.ranges)} ranges cannot have the grid {item.grid}")
    return time, height // side, width // side


def given_end(items: Sequence[InputItem]) -> int:
    """Return the position behind the last one that an item has, or 0."""
    return items[-1].end if items else 0


def rope_offset(items: Sequence[InputItem]) -> int:
    """Return what rotary positions behind the items are more than positions."""
    return int(rope_positions(items)[0, -1]) - given_end(items)


def rope_positions(items: Sequence[InputItem]) -> npt.NDArray[np.int64]:
    """Return the rotary positions up to the one behind the last item: in time, height and width, ``[3, n]``.

    An image takes as many as its longer side has rows. Items without a grid have the positions of tokens.
    """
    positions = np.tile(np.arange(given_end(items) + 1), (3, 1))
    for item in items:
        if item.grid:
            begin, count = item.ranges[0]
            grid = merged_grid(item)
            first = positions[0, begin]
            positions[:, begin : begin + count] = first + np.indices(grid).reshape(3, -1)
            positions[:, begin + count :] += max(grid[1:]) - count
    return positions
