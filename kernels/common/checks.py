"""Argument checks of launchers: their errors name the tensor and the dimension."""

from collections.abc import Collection, Mapping

import torch


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dims: Mapping[str, int | None],
    dtypes: Collection[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ValueError for a tensor that a kernel would misread.

    Args:
        name: the tensor's name in the launcher's signature.
        dims: dimension names in order, each with its required size, or None for any size.
        dtypes: the dtypes that the kernel supports.
        device: the device of the launcher's other tensors.

    Raises:
        ValueError: the rank, a size, the dtype, the device or the innermost stride is not supported.
    """
    _check_shape(name, tensor, dims)
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: dtype is {tensor.dtype}, expected {expected}")
    if tensor.device != device:
        raise ValueError(f"{name}: device is {tensor.device}, expected {device}")
    # Kernels take strides of all dimensions but the innermost, which they read with wide loads.
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise ValueError(
            f"{name}: the innermost dimension ({list(dims)[-1]}) has stride {tensor.stride(-1)}, expected 1"
        )


def _check_shape(name: str, tensor: torch.Tensor, dims: Mapping[str, int | None]) -> None:
    if tensor.dim() != len(dims):
        raise ValueError(f"{name}: expected the dimensions [{', '.join(dims)}], got shape {tuple(tensor.shape)}")
    for axis, (dim, size) in enumerate(dims.items()):
        if size is not None and tensor.shape[axis] != size:
            raise ValueError(f"{name}: dimension {axis} ({dim}) is {tensor.shape[axis]}, expected {size}")


def check_kv_cache(
    kv_cache: torch.Tensor,
    num_kv_heads: int | None,
    head_dim: int,
    like: torch.Tensor,
    dtypes: Collection[torch.dtype] | None = None,
    *,
    parts: int = 2,
) -> None:
    """Check that a KV cache is ``[2, num_blocks, block_size, num_kv_heads, head_dim]`` on ``like``'s device.

    Args:
        dtypes: dtypes that the kernel supports; by default only ``like``'s.
        parts: 1 for a cache of latents, which are keys and values.

    Raises:
        ValueError: as ``check_tensor``.
    """
    dims = {
        "keys and values": parts,
        "num_blocks": None,
        "block_size": None,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    check_tensor("kv_cache", kv_cache, dims, (like.dtype,) if dtypes is None else dtypes, like.device)


def check_scale(name: str, scale: torch.Tensor | None, num_kv_heads: int, device: torch.device) -> None:
    """Check that a KV cache's scale is float32 ``[1]`` (for all heads) or ``[num_kv_heads]``, or None for 1.

    Raises:
        ValueError: as ``check_tensor``.
    """
    if scale is not None:
        size = 1 if scale.shape == (1,) else num_kv_heads
        check_tensor(name, scale, {"num_kv_heads or 1": size}, (torch.float32,), device)
