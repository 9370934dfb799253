"""The work list of attention: which program attends from which queries to which keys. numpy only.

A *tile* is some consecutive tokens of one row. Its visible keys are cut into *pieces*, each the work of one program
(per KV head), so that a long row does not keep the device waiting after all others are done. A tile of one piece writes
its output; the pieces of any other leave partial results in *slots*, which a *merge* per token adds up.

This is the reference of ``attention_plan_triton``, and what plans steps whose lengths the host knows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.attention.attention_tiles import KEY_ALIGN

NO_SLOT = -1
"""The slot of a piece that writes its output directly."""

PIECE_COLUMNS = ("row", "first_token", "key_start", "key_end", "slot")
"""int32. The tile's row and its first token counted in the row; keys ``[key_start, key_end)``, none: nothing to do; the
slot of the tile's first token, the others follow."""

MERGE_COLUMNS = ("token", "first_slot", "num_partials", "slot_stride")
"""int32. The token in the step; its partials, those of a common prefix counted, 0: nothing to do; the slots of those
that are its own: ``first_slot``, ``first_slot + slot_stride`` and so on."""

Int = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Visible:
    """Which keys a token at ``position`` sees: up to itself, and from ``first_key`` on.

    Attributes:
        window: tokens that it sees, itself included; 0: all.
        prefix_len: keys that a pass over the rows' common prefix takes care of.
    """

    window: int = 0
    prefix_len: int = 0

    def first_key(self, position: Int) -> Int:
        first = np.zeros_like(position)
        if self.window:
            first = position - (self.window - 1)
        return np.maximum(first, self.prefix_len)


@dataclass(frozen=True, slots=True)
class Cut:
    """How keys are cut into pieces.

    Attributes:
        capacity: how many pieces there may be beyond one per tile.
        min_piece: keys of a piece at least; a multiple of KEY_ALIGN.
        fixed_split: cut at every multiple of this and nowhere else, however many pieces there are; 0: by ``capacity``.
    """

    capacity: int
    min_piece: int = 256
    fixed_split: int = 0


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles in the order in which their work should start. All int64 ``[num_tiles]``.

    Attributes:
        row, first_token, num_tokens: which tokens of which row.
        step_token: the first token's place in the step.
        first_key, end_key: keys that any of them sees.
        may_split: bool.
    """

    row: Int
    first_token: Int
    num_tokens: Int
    step_token: Int
    first_key: Int
    end_key: Int
    may_split: npt.NDArray[np.bool_]

    def reordered(self, order: Int) -> "QueryTiles":
        return QueryTiles(*(getattr(self, name)[order] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class WorkList:
    """``pieces`` int32 ``[num_pieces, 5]``, ``merges`` int32 ``[num_merges, 4]``; ``num_slots`` that they use."""

    pieces: Table
    merges: Table
    num_slots: int


def tile_rows(query_lens: Int, seq_lens: Int, rows: Int, tile_tokens: int, visible: Visible) -> QueryTiles:
    """Cut the queries of ``rows`` into tiles of at most ``tile_tokens`` tokens, row by row."""
    start_of_row = np.cumsum(query_lens) - query_lens
    tiles_of_row = -(-query_lens[rows] // tile_tokens)
    row = np.repeat(rows, tiles_of_row)
    index = np.arange(len(row)) - np.repeat(np.cumsum(tiles_of_row) - tiles_of_row, tiles_of_row)
    first_token = index * tile_tokens
    num_tokens = np.minimum(query_lens[row] - first_token, tile_tokens)
    position = seq_lens[row] - query_lens[row] + first_token
    return QueryTiles(
        row=row,
        first_token=first_token,
        num_tokens=num_tokens,
        step_token=start_of_row[row] + first_token,
        first_key=visible.first_key(position),
        end_key=position + num_tokens,
        may_split=np.ones(len(row), dtype=np.bool_),
    )


def piece_size(lengths: Int, cut: Cut) -> Int:
    """Keys of the pieces of each tile, of which it has ``ceil(length / size)``.

    The aim is ``total / capacity``; a tile gets as many pieces as come nearest to it, of equal size: so none has more
    than 1.5 times the aim, rounded up, and equal rows of which there are enough stay whole. A tile of length n gets at
    most ``1 + n / aim`` pieces, hence the bound: tiles + capacity.
    """
    if cut.fixed_split:
        return np.full_like(lengths, cut.fixed_split)
    aim = max(cut.min_piece, round_up(-(-int(lengths.sum()) // cut.capacity)))
    count = np.maximum((2 * lengths + aim) // (2 * aim), 1)
    size: Int = np.maximum(round_up(-(-lengths // count)), KEY_ALIGN)
    return size


def cut_tiles(tiles: QueryTiles, cut: Cut, tile_tokens: int, num_prefix: int = 0, first_slot: int = 0) -> WorkList:
    """The work list of ``tiles``; tiles in several pieces first, since they are the long ones.

    Args:
        num_prefix: partials that a pass over a common prefix leaves for every token; where there are any, every tile
            leaves partials.
        first_slot: where this list's slots start.
    """
    unit = cut.fixed_split or KEY_ALIGN
    start = tiles.first_key // unit * unit
    length = np.where(tiles.end_key > tiles.first_key, tiles.end_key - start, 0)
    size = np.where(tiles.may_split, piece_size(np.where(tiles.may_split, length, 0), cut), np.maximum(length, 1))
    count = -(-length // size)
    partial = (count > 1) | (num_prefix > 0)
    order = np.argsort(~partial, kind="stable")
    first_piece = np.cumsum(count[order]) - count[order]
    tile = np.repeat(order, count[order])
    number = np.arange(len(tile))
    key_start = start[tile] + (number - np.repeat(first_piece, count[order])) * size[tile]
    pieces = np.stack(
        [
            tiles.row[tile],
            tiles.first_token[tile],
            np.maximum(key_start, tiles.first_key[tile]),
            np.minimum(key_start + size[tile], tiles.end_key[tile]),
            np.where(partial[tile], first_slot + number * tile_tokens, NO_SLOT),
        ],
        axis=1,
    )
    merged = order[partial[order]]
    tokens = tiles.num_tokens[merged]
    within = np.arange(tokens.sum()) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    merges = np.stack(
        [
            np.repeat(tiles.step_token[merged], tokens) + within,
            first_slot + np.repeat(first_piece[partial[order]], tokens) * tile_tokens + within,
            np.repeat(count[merged], tokens) + num_prefix,
            np.full_like(within, tile_tokens),
        ],
        axis=1,
    )
    num_slots = int(count[merged].sum()) * tile_tokens
    return WorkList(pieces.astype(np.int32), merges.astype(np.int32), num_slots)


def prefix_pieces(num_tokens: int, prefix_len: int, tile_tokens: int, cut: Cut) -> tuple[Table, int]:
    """The pass in which all tokens of a step attend to a common prefix: its pieces, and partials per token.

    Here a tile is some consecutive tokens of the step, whatever their rows; the block table is row 0's. Depends on
    nothing but numbers that a captured graph has fixed. Partial j of token t is in slot ``j * num_tokens + t``.
    """
    first_token = np.arange(0, num_tokens, tile_tokens, dtype=np.int64)
    size = int(piece_size(np.full_like(first_token, prefix_len), cut)[0]) if num_tokens else prefix_len
    key_start = np.arange(0, prefix_len, size, dtype=np.int64)
    token, start = np.repeat(first_token, len(key_start)), np.tile(key_start, len(first_token))
    slot = start // size * num_tokens + token
    pieces = np.stack([np.zeros_like(token), token, start, np.minimum(start + size, prefix_len), slot], axis=1)
    return pieces.astype(np.int32), len(key_start)


def round_up(keys: Any) -> Any:
    """To a multiple of KEY_ALIGN: an int, or an array of them."""
    return -(-keys // KEY_ALIGN) * KEY_ALIGN
