"""Bidirectional attention within rows of tokens by the native library: its checked launcher, and a torch reference."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from quire.kernels.common.checks import check_tensor
from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import empty

DTYPES = (torch.float32, torch.bfloat16)

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)}
"""Relative and absolute tolerance against the reference: float32 arithmetic, one rounding of the outputs."""

_CPU = torch.device("cpu")


class _Rows(ctypes.Structure):
    """``Rows`` of row_attention.cpp."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("rotary", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("reach", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def attend_rows_reference(
    qkv: torch.Tensor,
    starts: npt.NDArray[np.int32],
    num_heads: int,
    *,
    reach: int = 0,
    rotary: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the attention of each row by torch, on any device; arguments and result are those of ``RowAttention``.

    Adjacent rows of one length are one call.
    """
    qkv = qkv.view(len(qkv), 3, num_heads, -1)
    parts, row = [], 0
    lengths = np.diff(starts).tolist()
    while row < len(lengths):
        length, end = lengths[row], row + 1
        while end < len(lengths) and lengths[end] == length:
            end += 1
        same = qkv[starts[row] : starts[end]].view(end - row, length, *qkv.shape[1:])
        query, key, value = same.permute(2, 0, 3, 1, 4)
        if rotary is not None:
            query, key = _rotate(query, rotary[:, :length]), _rotate(key, rotary[:, :length])
        mask = None
        if reach:
            at = torch.arange(length, device=qkv.device)
            mask = (at[:, None] - at).abs() <= reach
        parts.append(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2).flatten(0, 1))
        row = end
    return torch.cat(parts)


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate ``[rows, heads, length, head_dim]`` by ``[2, length, rotary_dim]``."""
    dim = table.shape[2]
    turned, rest = x[..., :dim], x[..., dim:]
    swapped = turned.roll(dim // 2, -1)
    return torch.cat([(turned.float() * table[0] + swapped.float() * table[1]).to(x.dtype), rest], -1)


class RowAttention:
    """The library's function, looked up once."""

    def __init__(self, native: Native) -> None:
        self._attend = native.function("quire_attend_rows", ctypes.c_void_p)

    def __call__(
        self,
        qkv: torch.Tensor,
        starts: npt.NDArray[np.int32],
        num_heads: int,
        *,
        reach: int = 0,
        rotary: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Let each token attend to the tokens of its row. A row's bits depend on that row alone.

        Args:
            qkv: float32 or bfloat16 ``[num_tokens, 3 * num_heads * head_dim]``: queries, keys, values. Rows may be
                strided.
            starts: int32 ``[num_rows + 1]``, contiguous, from 0 to ``num_tokens``: the first token of each row, which
                has one token or more.
            reach: tokens on each side that a token attends to; 0: all.
            rotary: float32 ``[2, positions, rotary_dim]``, contiguous: cosines, and sines whose first half is negated;
                None: queries and keys are not rotated.

        Returns:
            ``[num_tokens, num_heads * head_dim]``, contiguous.

        Raises:
            ValueError: an argument does not have this shape or dtype, or is not on the CPU.
        """
        check_tensor("qkv", qkv, {"num_tokens": None, "width": None}, DTYPES, _CPU)
        tokens, width = qkv.shape
        if width % (3 * num_heads) or qkv.stride(1) != 1:
            raise ValueError(f"qkv: expected rows of 3 * {num_heads} heads, got {tuple(qkv.shape)} {qkv.stride()}")
        lengths = np.diff(starts)
        if starts.dtype != np.int32 or not starts.flags.c_contiguous or starts[0] != 0 or starts[-1] != tokens:
            raise ValueError(f"starts: expected contiguous int32 from 0 to {tokens}, got {starts.dtype} {starts}")
        if not len(lengths) or lengths.min() < 1:
            raise ValueError(f"starts: expected one row or more, each of a token or more, got lengths {lengths}")
        head_dim = width // 3 // num_heads
        if rotary is not None:
            dims = {"2": 2, "positions": None, "rotary_dim": None}
            check_tensor("rotary", rotary, dims, (torch.float32,), _CPU)
            if not rotary.is_contiguous() or rotary.shape[1] < lengths.max() or rotary.shape[2] > head_dim:
                raise ValueError(
                    f"rotary: expected contiguous [2, {lengths.max()} or more, up to {head_dim}], "
                    f"got {tuple(rotary.shape)}"
                )
        out = empty((tokens, width // 3), qkv.dtype)
        call = _Rows(
            qkv=qkv.data_ptr(),
            out=out.data_ptr(),
            starts=starts.ctypes.data,
            rotary=None if rotary is None else rotary.data_ptr(),
            stride=qkv.stride(0),
            positions=0 if rotary is None else rotary.shape[1],
            rows=len(lengths),
            heads=num_heads,
            head_dim=head_dim,
            rotary_dim=0 if rotary is None else rotary.shape[2],
            reach=reach,
            is_bf16=qkv.dtype is torch.bfloat16,
            scale=head_dim**-0.5,
        )
        self._attend(ctypes.addressof(call))
        return out
