"""Work list of attention: which program computes which queries over which keys. numpy only.

A *tile* is a run of consecutive tokens of one row. Its visible keys are cut into *pieces*, each the work of one program
(per KV head), so that a long row does not leave the device idle while its last program runs. A tile with one piece
writes its output directly. The pieces of other tiles write partial results to *slots* of the scratch memory, and a
*merge* per token adds them.

Plans steps whose lengths are known on the host, and is the reference of ``attention_plan_triton``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.attention.attention_tiles import KEY_ALIGN

NO_SLOT = -1
"""Slot number of a piece that writes its output directly."""

PIECE_COLUMNS = ("row", "first_token", "key_start", "key_end", "slot")
"""int32. The tile's row, and its first token counted in the row; the keys ``[key_start, key_end)``, empty for an unused
entry; the slot of the tile's first token (those of its other tokens follow), or NO_SLOT."""

MERGE_COLUMNS = ("token", "first_slot", "num_partials", "slot_stride")
"""int32. The token's index in the step; the number of its partial results, including those of a common prefix (0 for an
unused entry); its own partials are in the slots ``first_slot``, ``first_slot + slot_stride`` and so on."""

Int = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


def first_key(position: Any, window: int, chunk: int) -> Any:
    """Return the first key that the token at ``position`` sees, for an int or an array of positions.

    Args:
        window: number of tokens that it sees, itself included; 0: no window.
        chunk: tokens of a chunk: it sees none before the beginning of its own; 0: no chunks.
    """
    if chunk:
        return position // chunk * chunk
    return np.maximum(position - (window - 1), 0) if window else position * 0


@dataclass(frozen=True, slots=True)
class Visible:
    """Range of keys that a token sees: from ``first_key(position)`` to its own, or to the last of its image.

    Attributes:
        window, chunk: as in the function ``first_key``; at most one is not 0.
        prefix_len: number of leading keys that the pass over the rows' common prefix computes.
    """

    window: int = 0
    chunk: int = 0
    prefix_len: int = 0

    @property
    def reach(self) -> int:
        """The kernels' argument for the window's length, or the chunk's."""
        return self.window or self.chunk

    @property
    def constants(self) -> dict[str, bool]:
        """The kernels' compile-time constants: tokens do not see all keys before them, and ``reach`` is a chunk's."""
        return {"WINDOWED": self.reach > 0, "CHUNKED": self.chunk > 0}

    def first_key(self, position: Int) -> Int:
        first: Int = np.maximum(first_key(position, self.window, self.chunk), self.prefix_len)
        return first


@dataclass(frozen=True, slots=True)
class CutRule:
    """Rule for cutting keys into pieces.

    Attributes:
        capacity: maximum number of pieces beyond one per tile.
        min_piece: minimum number of keys per piece; a multiple of KEY_ALIGN.
        fixed_split: cut at every multiple of this and nowhere else, with any number of pieces; 0: use ``capacity``.
    """

    capacity: int
    min_piece: int = 256
    fixed_split: int = 0


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles in the order in which their work should start. All int64 ``[num_tiles]``, except ``may_split``.

    Attributes:
        row: row of the tile.
        first_token, num_tokens: the tile's tokens, counted in the row.
        step_token: index of the first token in the step.
        first_key, end_key: range of keys that any of the tokens sees.
        may_split: bool ``[num_tiles]``: the tile's keys may be cut into several pieces.
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
    """Pieces and merges of one launch.

    Attributes:
        pieces: int32 ``[num_pieces, 5]``, columns ``PIECE_COLUMNS``.
        merges: int32 ``[num_merges, 4]``, columns ``MERGE_COLUMNS``.
        num_slots: number of slots that they use.
    """

    pieces: Table
    merges: Table
    num_slots: int


def tile_rows(
    query_lens: Int, seq_lens: Int, rows: Int, tile_tokens: int, visible: Visible, last_keys: Table | None = None
) -> QueryTiles:
    """Cut the queries of ``rows`` into tiles of at most ``tile_tokens`` tokens, row by row.

    ``last_keys``: as in ``plan_attention``.
    """
    start_of_row = np.cumsum(query_lens) - query_lens
    tiles_of_row = -(-query_lens[rows] // tile_tokens)
    row = np.repeat(rows, tiles_of_row)
    index = np.arange(len(row)) - np.repeat(np.cumsum(tiles_of_row) - tiles_of_row, tiles_of_row)
    first_token = index * tile_tokens
    num_tokens = np.minimum(query_lens[row] - first_token, tile_tokens)
    position = seq_lens[row] - query_lens[row] + first_token
    step_token = start_of_row[row] + first_token
    end_key = position + num_tokens if last_keys is None else last_keys[step_token + num_tokens - 1] + 1
    return QueryTiles(
        row=row,
        first_token=first_token,
        num_tokens=num_tokens,
        step_token=step_token,
        first_key=visible.first_key(position),
        end_key=end_key,
        may_split=np.ones(len(row), dtype=np.bool_),
    )


def piece_size(lengths: Int, cut: CutRule) -> Int:
    """Return the piece size in keys for each tile; a tile of ``length`` keys has ``ceil(length / size)`` pieces.

    The target size is ``total / capacity``. Each tile is cut into equal pieces, in the number that comes closest to the
    target. So no piece exceeds 1.5 times the target (rounded up), and when there are enough equally long rows, each
    stays whole. A tile of length n gets at most ``1 + n / target`` pieces, which bounds the total by tiles + capacity.
    """
    if cut.fixed_split:
        return np.full_like(lengths, cut.fixed_split)
    target = max(cut.min_piece, round_up(-(-int(lengths.sum()) // cut.capacity)))
    count = np.maximum((2 * lengths + target) // (2 * target), 1)
    size: Int = np.maximum(round_up(-(-lengths // count)), KEY_ALIGN)
    return size


def cut_tiles(tiles: QueryTiles, cut: CutRule, tile_tokens: int, num_prefix: int = 0, first_slot: int = 0) -> WorkList:
    """Return the work list of ``tiles``; tiles with several pieces come first, because they are the long ones.

    Args:
        num_prefix: number of partial results per token from the pass over a common prefix; if it is not 0, every tile
            writes partial results.
        first_slot: first slot that this list may use.
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


def prefix_pieces(num_tokens: int, prefix_len: int, tile_tokens: int, cut: CutRule) -> tuple[Table, int]:
    """Return the pieces of the pass over a common prefix, in which all tokens attend to it, and its partials per token.

    Here a tile is a run of consecutive tokens of the step, of any rows, and the block table is that of row 0.
    The result depends only on numbers that are fixed in a captured graph. Partial j of token t is in slot
    ``j * num_tokens + t``.
    """
    first_token = np.arange(0, num_tokens, tile_tokens, dtype=np.int64)
    size = int(piece_size(np.full_like(first_token, prefix_len), cut)[0]) if num_tokens else prefix_len
    key_start = np.arange(0, prefix_len, size, dtype=np.int64)
    token, start = np.repeat(first_token, len(key_start)), np.tile(key_start, len(first_token))
    slot = start // size * num_tokens + token
    pieces = np.stack([np.zeros_like(token), token, start, np.minimum(start + size, prefix_len), slot], axis=1)
    return pieces.astype(np.int32), len(key_start)


def round_up(keys: Any) -> Any:
    """Round an int or an array up to multiples of KEY_ALIGN."""
    return -(-keys // KEY_ALIGN) * KEY_ALIGN
