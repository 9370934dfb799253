"""Application of token bitmasks, such as those of grammars: sets logits to minus infinity where a bit is 0."""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable
from quire.kernels.cpu.sampling.logit_edits import native_edits

WORD_BITS = 32

TILE_WORDS = 64
"""Words per program: 2,048 tokens."""


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Apply bitmasks in place: on a GPU by Triton, on a CPU by the native library, or by torch without it.

    Args:
        logits: float32 ``[num_positions, vocab]``, rows may be strided; changed.
        rows: int64 ``[num_masks]``: the position of each mask, without duplicates.
        words: int32 ``[num_masks, num_words]``: token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is 1.
            Tokens past the last word are forbidden; words past the vocabulary are ignored.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device.
        IndexError: torch only: a row is out of range. The other implementations ignore it.
    """
    if not logits.is_cpu:
        launch_token_bitmask(logits, rows, words)
        return
    check_bitmask(logits, rows, words)
    edits = native_edits()
    forbid = apply_token_bitmask_reference if edits is None else edits.bitmask
    forbid(logits, rows, words)


def apply_token_bitmask_reference(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Reference of ``apply_token_bitmask`` in plain torch."""
    if bool((rows < 0).any()):
        raise IndexError(f"rows must not be negative (got {int(rows.min())})")
    bit = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    covered = words.shape[1] * WORD_BITS
    allowed = (words[:, :, None] >> bit & 1).bool().view(len(words), covered)
    missing = max(0, logits.shape[1] - covered)
    allowed = torch.nn.functional.pad(allowed, (0, missing))[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def launch_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Apply bitmasks by the Triton kernel.

    Raises:
        ValueError: as ``apply_token_bitmask``.
        RuntimeError: Triton cannot launch here.
    """
    check_bitmask(logits, rows, words)
    kernel = _kernel(logits.device)
    (num_masks, num_words), (num_positions, vocab) = words.shape, logits.shape
    if num_masks and vocab:
        kernel[(num_masks, -(-vocab // (TILE_WORDS * WORD_BITS)))](
            logits, rows, words, num_positions, vocab, num_words, logits.stride(0), words.stride(0),
            **launch_constants(),
        )  # fmt: skip


def launch_constants() -> dict[str, int]:
    """Compile-time constants of the kernel; shared with the test that compiles it ahead of time."""
    return {"TILE": TILE_WORDS * WORD_BITS}


def check_bitmask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Raise ValueError unless all arguments are valid for ``apply_token_bitmask``."""
    device = logits.device
    check_tensor("logits", logits, {"num_positions": None, "vocab": None}, (torch.float32,), device)
    check_tensor("words", words, {"num_masks": None, "num_words": None}, (torch.int32,), device)
    check_tensor("rows", rows, {"num_masks": len(words)}, (torch.int64,), device)


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.sampling.token_bitmask_triton import token_bitmask_kernel

    return token_bitmask_kernel
