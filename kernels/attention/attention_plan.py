"""Attention plans: how the work of one step and KV group is divided among programs; made once, used by all layers.

``plan_attention`` needs the lengths on the host; ``attention_decode`` makes plans inside a captured graph. Both follow
the rule in ``attention_work``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.attention.attention_tiles import (
    KEY_ALIGN,
    AttentionShape,
    Regime,
    device_capability,
    lane_chunks,
    next_power_of_two,
    tiles_of,
)
from quire.kernels.attention.attention_work import (
    MERGE_COLUMNS,
    CutRule,
    Int,
    Table,
    Visible,
    WorkList,
    cut_tiles,
    prefix_pieces,
    tile_rows,
)

Send = Callable[..., list[torch.Tensor]]
"""Copies host arrays to the device and returns the tensors, in order."""

FEW_TOKENS = 8
"""Rows with at most this many tokens in the step (a decoded token and drafts to verify) are planned as decode."""

TILE_TOKENS = 64
"""Tokens per tile of other rows; their lanes are divided among as many programs as needed."""

PROGRAMS_PER_PROCESSOR = 4
"""Approximate number of programs of 4 warps that a multiprocessor runs at a time."""

MIN_PIECE = 256


@dataclass(frozen=True, slots=True)
class Section:
    """One launch of the attention kernel.

    Attributes:
        pieces: int32 ``[num_pieces, 5]`` on the device, columns ``attention_work.PIECE_COLUMNS``.
        tile_tokens: maximum number of tokens per tile.
        shared: the launch computes all tokens of the step over the rows' common prefix.
    """

    pieces: torch.Tensor
    tile_tokens: int
    regime: Regime
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results, overwritten by each layer.

    Attributes:
        acc: float32 ``[num_slots, num_heads, out_dim]``: weighted sums of values.
        stats: float32 ``[num_slots, num_heads, 2]``: the largest score in units of log2, and the sum of weights.
    """

    acc: torch.Tensor
    stats: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Launches of ``PagedAttention`` for the layers of one ``shape`` and one window or length of chunks.

    Attributes:
        visible: window or chunk, and common prefix.
        num_rows: rows of the batch.
        num_tokens: tokens of all rows without padding; None if not known on the host.
        merges: int32 ``[num_merges, 4]`` on the device, columns ``attention_work.MERGE_COLUMNS``.
        num_prefix: number of partial results per token from a common prefix.
        prefix_stride: slots between two of these partials of a token: the number of tokens in the step.
        positions: int32 ``[num_tokens]``, the position of each token; only with a common prefix.
        last_keys: int32 ``[num_tokens]``, as in ``plan_attention``.
        fixed_split: as in ``attention_work.Cut``.
    """

    shape: AttentionShape
    visible: Visible
    num_rows: int
    num_tokens: int | None
    capability: int
    sections: tuple[Section, ...]
    merges: torch.Tensor
    scratch: Scratch
    num_prefix: int = 0
    prefix_stride: int = 0
    positions: torch.Tensor | None = None
    last_keys: torch.Tensor | None = None
    fixed_split: int = 0


@dataclass(frozen=True, slots=True)
class PrefixPass:
    """Pass over a prefix that all rows of a step share; planned outside a captured graph."""

    section: Section
    num_tokens: int
    prefix_len: int
    num_partials: int

    @property
    def num_slots(self) -> int:
        return self.num_partials * self.num_tokens


def allocate_scratch(shape: AttentionShape, num_slots: int, device: torch.device) -> Scratch:
    acc = torch.empty((num_slots, shape.num_heads, shape.out_dim), dtype=torch.float32, device=device)
    return Scratch(acc, torch.empty((num_slots, shape.num_heads, 2), dtype=torch.float32, device=device))


def default_programs(device: torch.device) -> int:
    """Return the number of programs that keep the device busy."""
    if device.type != "cuda":
        return 8
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def plan_attention(
    query_lens: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    shape: AttentionShape,
    device: torch.device,
    *,
    window: int = 0,
    chunk: int = 0,
    common_prefix_len: int = 0,
    fixed_split: int = 0,
    programs: int | None = None,
    min_piece: int = MIN_PIECE,
    num_tokens: int | None = None,
    last_keys: Table | None = None,
    send: Send | None = None,
) -> AttentionPlan:
    """Plan a step whose lengths are known on the host.

    Args:
        query_lens, seq_lens: int32 ``[num_rows]``, on the host. A row may be empty.
        window: number of tokens that a token sees, itself included; 0: no window.
        chunk: tokens of a chunk: a token sees none before the beginning of its own; 0: no chunks.
        common_prefix_len: number of leading keys that all rows have in the same blocks, which are attended to once for
            all rows. Must be a multiple of the block size; cannot be combined with a window or chunks.
        fixed_split: if not 0, plan deterministically: cut at multiples of this and nowhere else (see
            ``prepare_attention`` for the guarantee).
        programs: number of programs that fill the device; None: derived from its multiprocessors.
        min_piece: minimum number of keys per piece; a multiple of KEY_ALIGN.
        num_tokens: tokens of the step with padding; None: there is no padding.
        last_keys: int32 ``[num_tokens]``, on the host: the last position that each token sees, less than the row's
            length; never decreases from one token of a row to the next. None: its own.
        send: copies tables to the device, each aligned to 16 bytes, since Triton compiles a variant per alignment;
            None: with a copy for each, which waits.

    Raises:
        ValueError: lengths or options contradict each other.
    """
    visible = Visible(window, chunk, common_prefix_len)
    check_options(visible, fixed_split, min_piece)
    lens, seqs = query_lens.astype(np.int64), seq_lens.astype(np.int64)
    if len(lens) != len(seqs):
        raise ValueError(f"query_lens: {len(lens)} rows, but seq_lens has {len(seqs)}")
    if (lens > seqs).any():
        row = int((lens > seqs).argmax())
        raise ValueError(f"query_lens: row {row} has query length {lens[row]}, more than its seq_len {seqs[row]}")
    if (seqs < common_prefix_len).any():
        raise ValueError(f"common_prefix_len: {common_prefix_len} exceeds a row's {seqs.min()} keys")
    maker = PlanMaker(shape, device, programs, min_piece, fixed_split)
    send = send or _sender(device)
    prefix = None
    if common_prefix_len and len(lens):
        tokens = num_tokens or int(lens.sum())
        prefix = plan_prefix(
            shape, tokens, common_prefix_len, device, programs=programs, min_piece=min_piece, send=send
        )
    works, num_slots = maker.works(lens, seqs, visible, prefix, last_keys)
    *piece_tables, merges = send(*(w.pieces for *_, w in works), _joined(w.merges for *_, w in works))
    sections = [Section(t, n, regime) for t, (regime, n, _) in zip(piece_tables, works, strict=True)]
    return AttentionPlan(
        shape=shape,
        visible=visible,
        num_rows=len(lens),
        num_tokens=int(lens.sum()),
        capability=maker.capability,
        sections=tuple(([prefix.section] if prefix else []) + sections),
        merges=merges,
        scratch=allocate_scratch(shape, num_slots, device),
        num_prefix=prefix.num_partials if prefix else 0,
        prefix_stride=prefix.num_tokens if prefix else 0,
        positions=send(_positions(lens, seqs, prefix.num_tokens))[0] if prefix else None,
        last_keys=None if last_keys is None else send(last_keys)[0],
        fixed_split=fixed_split,
    )


def plan_prefix(
    shape: AttentionShape,
    num_tokens: int,
    prefix_len: int,
    device: torch.device,
    *,
    programs: int | None = None,
    min_piece: int = MIN_PIECE,
    send: Send | None = None,
) -> PrefixPass:
    """Plan the pass over a common prefix of ``prefix_len`` keys, for steps of ``num_tokens`` tokens with padding.

    ``send``: as in ``plan_attention``.
    """
    maker = PlanMaker(shape, device, programs, min_piece, 0)
    tile_tokens = min(TILE_TOKENS, next_power_of_two(num_tokens)) if num_tokens else 1
    cut = maker.cut("prefill", tile_tokens)
    pieces, num_partials = prefix_pieces(num_tokens, prefix_len, tile_tokens, cut)
    section = Section((send or _sender(device))(pieces)[0], tile_tokens, "prefill", shared=True)
    return PrefixPass(section, num_tokens, prefix_len, num_partials)


class PlanMaker:
    """Planner for one shape on one device."""

    def __init__(
        self, shape: AttentionShape, device: torch.device, programs: int | None, min_piece: int, fixed_split: int
    ) -> None:
        self.shape = shape
        self.capability = device_capability(device)
        self._programs = default_programs(device) if programs is None else programs
        self._min_piece = min_piece
        self._fixed_split = fixed_split

    def parts(self, query_lens: npt.NDArray[np.int64]) -> list[tuple[Regime, npt.NDArray[np.int64], int]]:
        """Return the launches: regime, rows, and tokens per tile of each."""
        # One launch with one size of tiles for all rows. Two launches would put a row with eight tokens into another
        # one than a row with nine, with another order of sums.
        if self._fixed_split:
            return [("fixed", np.arange(len(query_lens)), TILE_TOKENS)]
        # Rows with few queries are bound by reading keys, the others by arithmetic. One launch for both would give each
        # the other's tiles.
        few = query_lens <= FEW_TOKENS
        most = int(query_lens[few].max(initial=0))
        parts: list[tuple[Regime, npt.NDArray[np.int64], int]] = []
        if most:
            parts.append(("decode", np.flatnonzero(few & (query_lens > 0)), next_power_of_two(most)))
        if not few.all():
            parts.append(("prefill", np.flatnonzero(~few), TILE_TOKENS))
        return parts

    def works(
        self, lens: Int, seqs: Int, visible: Visible, prefix: PrefixPass | None, last_keys: Table | None
    ) -> tuple[list[tuple[Regime, int, WorkList]], int]:
        """Return each launch's regime, tokens per tile and work list, and the number of slots with the prefix's."""
        num_prefix, first_slot = (prefix.num_partials, prefix.num_slots) if prefix else (0, 0)
        works: list[tuple[Regime, int, WorkList]] = []
        for regime, rows, tile_tokens in self.parts(lens):
            tiles = tile_rows(lens, seqs, rows, tile_tokens, visible, last_keys)
            if regime == "prefill":
                # Longest first, so that no program runs long after the others have finished.
                tiles = tiles.reordered(np.argsort(tiles.first_key - tiles.end_key, kind="stable"))
            elif regime == "fixed":
                tiles.may_split[:] = lens[tiles.row] <= FEW_TOKENS
            work = cut_tiles(tiles, self.cut(regime, tile_tokens), tile_tokens, num_prefix, first_slot)
            first_slot += work.num_slots
            works.append((regime, tile_tokens, work))
        return works, first_slot

    def cut(self, regime: Regime, tile_tokens: int) -> CutRule:
        tiles = tiles_of(self.shape, regime, tile_tokens, self.capability)
        per_piece = self.shape.num_kv_heads * lane_chunks(self.shape, tiles, tile_tokens)
        # As many pieces as programs run at a time: fewer leave processors idle, more only add partial results that must
        # be merged.
        return CutRule(-(-self._programs // per_piece), self._min_piece, self._fixed_split)


def _positions(lens: npt.NDArray[Any], seqs: npt.NDArray[Any], num_tokens: int) -> npt.NDArray[np.int32]:
    positions = np.zeros(num_tokens, dtype=np.int32)
    row_end = np.repeat(np.cumsum(lens), lens)
    positions[: len(row_end)] = np.repeat(seqs, lens) - (row_end - np.arange(len(row_end)))
    return positions


def _joined(tables: Any) -> Table:
    parts = list(tables)
    return np.concatenate(parts) if parts else np.zeros((0, len(MERGE_COLUMNS)), dtype=np.int32)


def _sender(device: torch.device) -> Send:
    return lambda *tables: [torch.from_numpy(table).to(device) for table in tables]


def check_options(visible: Visible, fixed_split: int, min_piece: int) -> None:
    """Raise ValueError if options of a plan contradict each other."""
    limits = f"window {visible.window}, chunk {visible.chunk}"
    if min(visible.window, visible.chunk, visible.prefix_len, fixed_split) < 0:
        sizes = f"{limits}, common_prefix_len {visible.prefix_len}, fixed_split {fixed_split}"
        raise ValueError(f"{sizes}: none may be negative")
    if visible.window and visible.chunk:
        raise ValueError(f"{limits}: at most one may be given")
    if visible.prefix_len and (visible.reach or fixed_split):
        other = limits if visible.reach else f"fixed_split {fixed_split}"
        raise ValueError(f"common_prefix_len: {visible.prefix_len} cannot be combined with {other}")
    if fixed_split % KEY_ALIGN:
        raise ValueError(f"fixed_split: {fixed_split} is not a multiple of {KEY_ALIGN}")
    if min_piece <= 0 or min_piece % KEY_ALIGN:
        raise ValueError(f"min_piece: {min_piece} is not a positive multiple of {KEY_ALIGN}")
