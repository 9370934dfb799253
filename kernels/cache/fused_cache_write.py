"""Fused cache write: head norms (RMS), rotation and the cache write of a layer in one launch.

The projection is read once, and no intermediate result is written. A decode step launches one kernel here instead of
about six, each of which takes longer to launch than to run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quire.kernels.cache.cache_write import ACTIVATION_DTYPES, check_target, stored_constants, write_cache_reference
from quire.kernels.common.checks import check_tensor
from quire.kernels.common.fp8 import as_bits
from quire.kernels.common.launches import Launch, launch_nothing, layout_of, once_per_layout
from quire.kernels.common.triton_runtime import require_launchable

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
"""Allowed difference of rotated queries and keys from the reference for standard normal inputs: both round once, at the
end, possibly in different directions. The cache content is exactly that of ``write_cache_reference`` with the rotated
key."""

PROGRAM_ELEMENTS = 2048
"""Elements of heads per program: 16 for each of 128 threads, in loads of 16 bytes."""


class CacheWrite(NamedTuple):
    """What a layer's cache write takes.

    Attributes:
        qkv: float32, float16 or bfloat16 ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, or queries alone
            (``[num_tokens, num_heads, head_dim]``), which write no cache; tokens and heads may be strided. If the cache
            has one part, of latents, there are keys only: ``[num_tokens, num_heads + num_kv_heads, head_dim]``.
        kv_cache, slot_mapping, k_scale, v_scale: as in ``write_cache_reference``; ``kv_cache`` and ``slot_mapping`` are
            None for queries alone. For a token with a negative slot, only the cache write is skipped. A kernel cannot
            raise: a slot past the end of the cache, an error of the caller, is not written either.
        q_norm, k_norm: ``[head_dim]`` in any of the dtypes above: weights of the RMS norm of each head (``norm_eps`` is
            added to the mean square). ``k_norm`` may be None for queries alone.
        rotary_table: ``[2, max_position, rotary_dim]`` in any of the dtypes above: cosines, and sines whose first half
            is negated; both halves are otherwise equal. Dimension ``i`` is rotated with ``i + rotary_dim / 2``;
            dimensions from ``rotary_dim`` on stay unchanged. None: no rotation.
        positions: int64 ``[num_tokens]``. A position outside the table is an error of the caller that cannot be raised
            here: the token is not rotated.
        key_out, value_out: contiguous ``[num_tokens, num_kv_heads, head_dim]``, to be filled with keys and values
            before their conversion to the cache's dtype, for attention over a prompt's own keys; or both None.
    """

    qkv: torch.Tensor
    num_heads: int
    kv_cache: torch.Tensor | None
    slot_mapping: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    rotary_table: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    key_out: torch.Tensor | None = None
    value_out: torch.Tensor | None = None


def fused_cache_write_reference(given: CacheWrite) -> torch.Tensor:
    """Compute ``fused_cache_write`` in plain torch and float64; the two agree within ``TOLERANCES``.

    Raises:
        IndexError: a slot is past the end of the cache, or a position past the end of the table.
    """
    qkv, num_heads = given.qkv, given.num_heads
    num_kv_heads = (qkv.shape[1] - num_heads) // _parts(given.kv_cache)
    query, key, value = qkv.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
    cos_sin = None
    if given.rotary_table is not None and given.positions is not None:
        cos_sin = given.rotary_table[:, given.positions].double().unsqueeze(2)
    query = _normalised_and_rotated(query, given.q_norm, given.norm_eps, cos_sin)
    key = _normalised_and_rotated(key, given.k_norm, given.norm_eps, cos_sin)
    if given.key_out is not None and given.value_out is not None:
        given.key_out.copy_(key)
        given.value_out.copy_(value)
    if given.kv_cache is not None and given.slot_mapping is not None:
        write_cache_reference(key, value, given.kv_cache, given.slot_mapping, given.k_scale, given.v_scale)
    return query


def _normalised_and_rotated(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor | None
) -> torch.Tensor:
    """Return ``x`` (``[num_tokens, heads, head_dim]``) normalised and rotated, and rounded once."""
    exact = x.double()
    if weight is not None:
        exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    if cos_sin is not None:
        rotary_dim = cos_sin.shape[-1]
        pairs, rest = exact[..., :rotary_dim], exact[..., rotary_dim:]
        swapped = pairs.roll(rotary_dim // 2, -1)
        exact = torch.cat([pairs * cos_sin[0] + swapped * cos_sin[1], rest], -1)
    return exact.to(x.dtype)


def fused_cache_write(given: CacheWrite) -> torch.Tensor:
    """Normalise and rotate queries and keys, and write keys and values to their slots, with the Triton kernel.

    Returns:
        The queries, ``[num_tokens, num_heads, head_dim]`` in qkv's dtype, contiguous.

    Raises:
        ValueError: a tensor does not have its shape, dtype or device, or one of a pair is missing.
        RuntimeError: Triton cannot launch in this process.
    """
    write = prepare_cache_write(given)
    qkv, cache, q_norm, k_norm = given.qkv, given.kv_cache, given.q_norm, given.k_norm
    query = qkv.new_empty(len(qkv), given.num_heads, qkv.shape[2])
    write(
        qkv, query, None if cache is None else as_bits(cache), given.slot_mapping, given.key_out, given.value_out,
        q_norm, k_norm if k_norm is not None else q_norm, given.rotary_table, given.positions, given.k_scale,
        given.v_scale,
    )  # fmt: skip
    return query


def prepare_cache_write(given: CacheWrite) -> Callable[..., None]:
    """Check the arguments of ``fused_cache_write`` and return their launch, for tensors of the same layouts.

    Its arguments: qkv, the queries' tensor, kv_cache (``as_bits``), slot_mapping, key_out, value_out, q_norm, k_norm
    (q_norm if there is none), rotary_table, positions, k_scale, v_scale.
    """
    return _prepare(tuple(layout_of(each) if isinstance(each, torch.Tensor) else each for each in given), given)


@once_per_layout
def _prepare(given: CacheWrite) -> Callable[..., None]:
    qkv, num_heads, kv_cache, slot_mapping, *_ = given
    rotary_table, k_scale, v_scale = given.rotary_table, given.k_scale, given.v_scale
    num_tokens, num_kv_heads, head_dim = _check_projection(qkv, num_heads, kv_cache, slot_mapping)
    fresh = qkv[:, num_heads : num_heads + num_kv_heads]
    if kv_cache is not None and slot_mapping is not None:
        check_target(fresh, kv_cache, slot_mapping, k_scale, v_scale)
    _check_norms(given.q_norm, given.k_norm, qkv, num_kv_heads)
    rotary_dim = _check_rotary(rotary_table, given.positions, qkv)
    _check_outputs(given.key_out, given.value_out, fresh)
    kernel = _kernel(qkv.device)
    if num_tokens == 0:
        return launch_nothing
    constants = launch_constants(num_heads, num_kv_heads, head_dim, rotary_dim, kv_cache, k_scale, v_scale)
    of_parts = (num_heads, *(num_kv_heads,) * _parts(kv_cache))
    programs = [-(-num_tokens * heads // constants["ROWS"]) for heads in of_parts]
    last = (
        given.norm_eps,
        num_tokens,
        0 if kv_cache is None else kv_cache.shape[1] * kv_cache.shape[2],
        0 if rotary_table is None else rotary_table.shape[1],
        *((0, 0) if rotary_table is None else rotary_table.stride()[:2]),
        *qkv.stride()[:2],
        *((0, 0, 0, 0) if kv_cache is None else kv_cache.stride()[:4]),
    )
    return Launch(kernel, (sum(programs),), last, constants)


def launch_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    kv_cache: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> dict[str, int]:
    """Return the kernel's compile-time constants; also used by the ahead-of-time compilation test.

    A head is loaded as the two halves that rotate with each other and the unrotated rest; a head without rotation is
    loaded as its two halves.
    """
    half = (rotary_dim or head_dim) // 2
    rest = head_dim - 2 * half
    return stored_constants(kv_cache, k_scale, v_scale) | {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HALF_TILE": _next_power_of_two(half),
        "REST_TILE": _next_power_of_two(rest) if rest else 0,
        "BLOCK_SIZE": 1 if kv_cache is None else kv_cache.shape[2],
        "ROWS": max(1, PROGRAM_ELEMENTS // _next_power_of_two(head_dim)),
    }


def _parts(kv_cache: torch.Tensor | None) -> int:
    """Return 2 for keys and values, 1 for latents."""
    return 2 if kv_cache is None else len(kv_cache)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _missing(first: torch.Tensor | None, second: torch.Tensor | None) -> str:
    given = ("None" if tensor is None else "a tensor" for tensor in (first, second))
    return f"got {' and '.join(given)}"


def _check_projection(
    qkv: torch.Tensor, num_heads: int, kv_cache: torch.Tensor | None, slot_mapping: torch.Tensor | None
) -> tuple[int, int, int]:
    """Check the projection and return the numbers of tokens and KV heads, and the head dimension."""
    dims = {"num_tokens": None, "num_heads + 2 * num_kv_heads": None, "head_dim": None}
    check_tensor("qkv", qkv, dims, ACTIVATION_DTYPES, qkv.device)
    num_tokens, all_heads, head_dim = qkv.shape
    parts = _parts(kv_cache)
    if all_heads < num_heads or (all_heads - num_heads) % parts:
        raise ValueError(f"qkv: dimension 1 is {all_heads}, expected {num_heads} heads and twice a number of KV heads")
    if head_dim % 2:
        raise ValueError(f"qkv: dimension 2 (head_dim) is {head_dim}, expected an even number")
    has_keys = all_heads > num_heads
    if (kv_cache is not None) != has_keys or (slot_mapping is not None) != has_keys:
        expected = "both, because qkv has keys" if has_keys else "neither, because qkv has queries alone"
        raise ValueError(f"kv_cache, slot_mapping: expected {expected}; {_missing(kv_cache, slot_mapping)}")
    return num_tokens, (all_heads - num_heads) // parts, head_dim


def _check_norms(
    q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, qkv: torch.Tensor, num_kv_heads: int
) -> None:
    if num_kv_heads and (q_norm is None) != (k_norm is None):
        raise ValueError(f"q_norm, k_norm: expected both or neither; {_missing(q_norm, k_norm)}")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, {"head_dim": qkv.shape[2]}, ACTIVATION_DTYPES, qkv.device)


def _check_rotary(rotary_table: torch.Tensor | None, positions: torch.Tensor | None, qkv: torch.Tensor) -> int:
    """Check the rotary arguments and return the number of rotated dimensions (0 without rotation)."""
    if rotary_table is None or positions is None:
        if rotary_table is not None or positions is not None:
            raise ValueError(f"rotary_table, positions: expected both or neither; {_missing(rotary_table, positions)}")
        return 0
    dims = {"cosines and sines": 2, "max_position": None, "rotary_dim": None}
    check_tensor("rotary_table", rotary_table, dims, ACTIVATION_DTYPES, qkv.device)
    check_tensor("positions", positions, {"num_tokens": qkv.shape[0]}, (torch.int64,), qkv.device)
    rotary_dim = rotary_table.shape[2]
    if rotary_dim % 2 or not 0 < rotary_dim <= qkv.shape[2]:
        raise ValueError(
            f"rotary_table: dimension 2 (rotary_dim) is {rotary_dim}, expected an even number up to {qkv.shape[2]}"
        )
    return rotary_dim


def _check_outputs(key_out: torch.Tensor | None, value_out: torch.Tensor | None, fresh: torch.Tensor) -> None:
    if (key_out is None) != (value_out is None):
        raise ValueError(f"key_out, value_out: expected both or neither; {_missing(key_out, value_out)}")
    for name, out in (("key_out", key_out), ("value_out", value_out)):
        if out is not None:
            dims = dict(zip(("num_tokens", "num_kv_heads", "head_dim"), fresh.shape, strict=True))
            check_tensor(name, out, dims, (fresh.dtype,), fresh.device)
            if not out.is_contiguous():
                raise ValueError(f"{name}: strides are {out.stride()}, expected a contiguous tensor")


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.cache.fused_cache_write_triton import fused_cache_write_kernel

    return fused_cache_write_kernel
