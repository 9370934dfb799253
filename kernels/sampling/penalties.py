"""Repetition, frequency and presence penalties on the logits of tokens in a request's prompt and output, in place.

A token's *count* is an int32: bit 30 is set if the token is in the prompt, the lower bits count it in the output.
Drafts before a position in the same step count as output. First, the logit of a token in the prompt or output is
divided by the repetition penalty if it is positive, otherwise multiplied (Keskar et al., 2019,
https://arxiv.org/abs/1909.05858). Then ``frequency * count + presence`` is subtracted for tokens in the output.

Each operation is rounded to float32 once, so that all implementations give the same bits.
"""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.penalty_rows import PenaltyRows
from quire.kernels.common.triton_runtime import require_launchable

PROMPT_BIT = 1 << 30

COUNT_MASK = PROMPT_BIT - 1

TILE_TOKENS = 2048


def apply_penalties(logits: torch.Tensor, counts: torch.Tensor, rows: PenaltyRows) -> None:
    """Penalise ``logits`` in place: on a GPU by Triton, on a CPU by torch (by C++: ``kernels.cpu.sampling.penalties``).

    Args:
        logits: float32 ``[num_positions, vocab]``, rows may be strided.
        counts: int32 ``[num_slots, vocab]``, rows may be strided.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device.
        IndexError: torch only: a slot or a draft is out of range. Triton ignores such a row or draft.
    """
    if not logits.is_cpu:
        launch_penalties(logits, counts, rows)
        return
    _check(logits, counts, rows)
    apply_penalties_reference(logits, counts, rows)


def apply_penalties_reference(logits: torch.Tensor, counts: torch.Tensor, rows: PenaltyRows) -> None:
    """Reference of ``apply_penalties`` in plain torch."""
    slots, repetition, frequency, presence, offsets, drafts = rows
    at = torch.nonzero(slots >= 0)[:, 0]
    if not len(at):
        return
    held = counts[slots[at].long()]
    answer = held & COUNT_MASK
    before = offsets[at]
    for distance in range(1, int(before.max()) + 1):
        with_draft = torch.nonzero(before >= distance)[:, 0]
        tokens = drafts[at[with_draft] - distance]
        if bool((tokens < 0).any()):
            raise IndexError(f"drafts must not be negative (got {int(tokens.min())})")
        answer[with_draft, tokens] += 1
    own = logits[at]
    factor = repetition[at][:, None]
    repeated = torch.where(own > 0, own / factor, own * factor)
    own = torch.where((held & PROMPT_BIT != 0) | (answer > 0), repeated, own)
    penalty = frequency[at][:, None] * answer.float() + presence[at][:, None]
    logits[at] = torch.where(answer > 0, own - penalty, own)


def launch_penalties(logits: torch.Tensor, counts: torch.Tensor, rows: PenaltyRows) -> None:
    """Apply the penalties by the Triton kernel.

    Raises:
        ValueError: as ``apply_penalties``.
        RuntimeError: Triton cannot launch here.
    """
    _check(logits, counts, rows)
    kernel = _kernel(logits.device)
    num_positions, vocab = logits.shape
    if num_positions and vocab:
        kernel[(num_positions, -(-vocab // TILE_TOKENS))](
            logits, counts, *rows, vocab, len(counts), logits.stride(0), counts.stride(0),
            **launch_constants(), enable_fp_fusion=False,
        )  # fmt: skip


def launch_constants() -> dict[str, int]:
    """Compile-time constants of the kernel; shared with the test that compiles it ahead of time."""
    return {"PROMPT_BIT": PROMPT_BIT, "TILE": TILE_TOKENS}


def _check(logits: torch.Tensor, counts: torch.Tensor, rows: PenaltyRows) -> None:
    """Raise ValueError unless all arguments are valid for ``apply_penalties``."""
    check_tensor("logits", logits, {"num_positions": None, "vocab": None}, (torch.float32,), logits.device)
    num_positions, vocab = logits.shape
    check_tensor("counts", counts, {"num_slots": None, "vocab": vocab}, (torch.int32,), logits.device)
    rows.check(num_positions, logits.device, (torch.int32, torch.int64))


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.sampling.penalties_triton import penalties_kernel

    return penalties_kernel
