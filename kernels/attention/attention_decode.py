"""Attention plans for steps of few queries per row, made from device tensors alone.

``plan_decode`` reads no length on the host and writes to preallocated ``DecodeBuffers``, so that a captured graph can
contain it: the launches depend on shapes only, and each replay uses the lengths that are then on the device.
"""

from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.attention.attention_plan import (
    MIN_PIECE,
    AttentionPlan,
    PlanMaker,
    PrefixPass,
    Scratch,
    Section,
    allocate_scratch,
    check_options,
)
from quire.kernels.attention.attention_tiles import KEY_ALIGN, AttentionShape, device_capability, next_power_of_two
from quire.kernels.attention.attention_work import MERGE_COLUMNS, PIECE_COLUMNS, CutRule, Visible
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

MAX_ROWS = 8192
"""Maximum number of rows: one program plans them all."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of the buffers: ``max_rows`` rows of up to ``tile_tokens`` tokens."""

    max_rows: int
    tile_tokens: int
    cut: CutRule

    def num_pieces(self, num_rows: int) -> int:
        """Return the maximum number of pieces of ``num_rows`` rows."""
        return num_rows + self.cut.capacity

    def num_merged(self, num_rows: int, cascade: bool) -> int:
        """Return how many of ``num_rows`` rows can write partial results; with a common prefix (``cascade``), all."""
        # Without a prefix such a row has at least one piece beyond its first, and there are at most `capacity` of
        # these.
        return num_rows if cascade else min(num_rows, self.cut.capacity)

    def num_slots(self, cascade: bool) -> int:
        return (self.num_merged(self.max_rows, cascade) + self.cut.capacity) * self.tile_tokens


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Memory that ``plan_decode`` writes and the layers' launches read and write; the same in every step.

    Allocated by ``allocate_decode``. Only one step at a time may use it. ``prefix_slots`` is the number of slots for a
    common prefix.
    """

    shape: AttentionShape
    limits: DecodeLimits
    prefix_slots: int
    pieces: torch.Tensor
    merges: torch.Tensor
    scratch: Scratch


def allocate_decode(
    shape: AttentionShape,
    max_rows: int,
    device: torch.device,
    *,
    max_query_len: int = 1,
    max_prefix: PrefixPass | None = None,
    programs: int | None = None,
    min_piece: int = MIN_PIECE,
) -> DecodeBuffers:
    """Allocate buffers for steps of up to ``max_rows`` rows with up to ``max_query_len`` tokens each.

    Args:
        max_prefix: of the prefix passes that the steps will use, the one with the most partial results; None if no step
            has a common prefix.

    Raises:
        ValueError: options contradict each other.
    """
    check_options(Visible(), 0, min_piece)
    if not 0 < max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows: {max_rows} is not in [1, {MAX_ROWS}]")
    cut = PlanMaker(shape, device, programs, min_piece, 0).cut("decode", max_query_len)
    limits = DecodeLimits(max_rows, max_query_len, cut)
    cascade = max_prefix is not None
    prefix_slots = max_prefix.num_slots if max_prefix else 0
    max_pieces, max_merges = limits.num_pieces(max_rows), limits.num_merged(max_rows, cascade) * max_query_len
    return DecodeBuffers(
        shape=shape,
        limits=limits,
        prefix_slots=prefix_slots,
        pieces=torch.zeros((max_pieces, len(PIECE_COLUMNS)), dtype=torch.int32, device=device),
        merges=torch.zeros((max_merges, len(MERGE_COLUMNS)), dtype=torch.int32, device=device),
        scratch=allocate_scratch(shape, limits.num_slots(cascade) + prefix_slots, device),
    )


def plan_decode(
    buffers: DecodeBuffers,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int = 0,
    chunk: int = 0,
    prefix: PrefixPass | None = None,
) -> AttentionPlan:
    """Plan a step from device tensors, with one launch and neither a copy nor a wait.

    Args:
        query_start_loc: int32 ``[num_rows + 1]``. Rows without tokens, such as a graph's padding rows, get no work.
            Rows with more tokens than the buffers allow are an error of the caller that cannot be raised here: they are
            not computed.
        seq_lens: int32 ``[num_rows]``.
        window, chunk: as in ``plan_attention``.
        prefix: ``plan_prefix`` of a prefix that all rows share, for as many tokens as the query will have.

    Raises:
        ValueError: the rows or the prefix's partial results do not fit the buffers.
        RuntimeError: Triton cannot launch in this process.
    """
    limits = buffers.limits
    visible = Visible(window, chunk, prefix.prefix_len if prefix else 0)
    check_options(visible, 0, limits.cut.min_piece)
    device = buffers.pieces.device
    check_tensor("seq_lens", seq_lens, {"num_rows": None}, (torch.int32,), device)
    num_rows = len(seq_lens)
    check_tensor("query_start_loc", query_start_loc, {"num_rows + 1": num_rows + 1}, (torch.int32,), device)
    if num_rows > limits.max_rows:
        raise ValueError(f"seq_lens: dimension 0 (num_rows) is {num_rows}, above the buffers' {limits.max_rows}")
    if prefix is not None and prefix.num_slots > buffers.prefix_slots:
        raise ValueError(f"prefix: {prefix.num_slots} partial results do not fit buffers for {buffers.prefix_slots}")
    pieces = buffers.pieces[: limits.num_pieces(num_rows)]
    merges = buffers.merges[: limits.num_merged(num_rows, prefix is not None) * limits.tile_tokens]
    if num_rows:
        _launch_plan(limits, query_start_loc, seq_lens, pieces, merges, visible, prefix)
    section = Section(pieces, limits.tile_tokens, "decode")
    return AttentionPlan(
        shape=buffers.shape,
        visible=visible,
        num_rows=num_rows,
        num_tokens=None,
        capability=device_capability(device),
        sections=(prefix.section, section) if prefix else (section,),
        merges=merges,
        scratch=buffers.scratch,
        num_prefix=prefix.num_partials if prefix else 0,
        prefix_stride=prefix.num_tokens if prefix else 0,
        positions=_positions(query_start_loc, seq_lens, prefix.num_tokens) if prefix else None,
    )


def plan_constants(visible: Visible, max_rows: int) -> dict[str, Any]:
    """Return the compile-time constants of the planning kernel; also used by the ahead-of-time compilation test."""
    return visible.constants | {"KEY_ALIGN": KEY_ALIGN, "TILE_ROWS": max(16, next_power_of_two(max_rows))}


def plan_options(max_rows: int) -> dict[str, int]:
    return {"num_warps": 8 if max_rows > 256 else 4}


def _launch_plan(
    limits: DecodeLimits,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    pieces: torch.Tensor,
    merges: torch.Tensor,
    visible: Visible,
    prefix: PrefixPass | None,
) -> None:
    require_launchable(pieces.device.type)
    from quire.kernels.attention.attention_plan_triton import plan_kernel

    plan_kernel[(1,)](
        query_start_loc, seq_lens, pieces, merges, len(seq_lens), len(pieces), len(merges), limits.tile_tokens,
        visible.reach, visible.prefix_len, prefix.num_partials if prefix else 0, prefix.num_slots if prefix else 0,
        limits.cut.capacity, limits.cut.min_piece,
        **plan_constants(visible, limits.max_rows), **plan_options(limits.max_rows),
    )  # fmt: skip


def _positions(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    token = torch.arange(num_tokens, dtype=torch.int32, device=seq_lens.device)
    row_end = query_start_loc[1:]
    row = torch.searchsorted(row_end, token, right=True).clamp_(max=len(seq_lens) - 1)
    return seq_lens[row] - (row_end[row] - token)
