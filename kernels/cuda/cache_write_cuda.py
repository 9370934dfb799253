"""The cache write by CUDA C++ (``cuda/cache_write.cu``): the same as ``cache_write.write_cache``."""

from dataclasses import dataclass
from functools import cache

import torch

from quire.kernels.cache.cache_write import check_write
from quire.kernels.common.checks import CacheLayout, nhd_view
from quire.kernels.cuda.build import fatbin, source_of
from quire.kernels.cuda.launch import Kernel, current_stream, load_kernel, read_params

THREADS = 256
"""Of a block, as the source says; each writes one run of elements."""

RUN_BYTES = 16
"""Of keys that a thread loads at once, where everything is aligned to that."""

LIMIT = 2**31
"""Runs and slots are counted in 32 bits; nothing that fits a GPU comes near."""


def write_cache_cuda(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: CacheLayout = "NHD",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """As ``cache_write.write_cache``; the two agree exactly. The tensors are on the current CUDA device.

    Raises:
        ValueError: a tensor does not have the shape, dtype or place that is said there, or is too large.
        RuntimeError: the tensors are not on a CUDA device, or the kernel cannot be compiled or loaded.
    """
    check_write(key, value, kv_cache, slot_mapping, layout, k_scale, v_scale)
    if key.device.type != "cuda":
        raise RuntimeError(f"CUDA kernels need CUDA, and the tensors are on {key.device.type!r}")
    launch = plan_launch(key, value, kv_cache, slot_mapping, layout, k_scale, v_scale)
    device_index = key.device.index
    if launch.blocks:
        _kernel(launch.name, device_index).launch(launch.blocks, current_stream(device_index), *launch.values)


@dataclass(frozen=True, slots=True)
class Launch:
    """Which kernel, how many blocks of ``THREADS`` threads, and the members of its ``CacheWriteParams``."""

    name: str
    blocks: int
    values: tuple[int, ...]


def plan_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: CacheLayout,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> Launch:
    """The launch for checked tensors; their memory must stay until it has run.

    Raises:
        ValueError: a tensor is too large.
    """
    cache_view = nhd_view(kv_cache, layout)
    num_elements, block_size = key.numel(), cache_view.shape[2]
    num_slots = cache_view.shape[1] * block_size
    if max(num_elements, num_slots) >= LIMIT:
        raise ValueError(f"key, kv_cache: {num_elements} elements and {num_slots} slots, expected less than {LIMIT}")
    width = run_width(key, value, cache_view)
    values = (
        key.data_ptr(),
        value.data_ptr(),
        kv_cache.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        slot_mapping.data_ptr(),
        num_slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache_view.stride()[:4],
        *key.shape,
        block_size,
        int(k_scale is not None and len(k_scale) > 1),
        int(v_scale is not None and len(v_scale) > 1),
        int(width > 1),
    )
    return Launch(kernel_name(key.dtype, kv_cache.dtype), -(-num_elements // (width * THREADS)), values)


def run_width(key: torch.Tensor, value: torch.Tensor, nhd_cache: torch.Tensor) -> int:
    """Elements that a thread writes: ``RUN_BYTES`` of keys, or 1 where a run would cross a head or not be aligned."""
    width = RUN_BYTES // key.element_size()
    if key.shape[2] % width:
        return 1
    for tensor in (key, value, nhd_cache):
        size = tensor.element_size()
        # A number divides all of these if it is a power of two that divides their union of bits.
        bits = tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            bits |= stride * size
        if bits % min(RUN_BYTES, width * size):
            return 1
    return width


def kernel_name(key_dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """As the macros in the source make it."""
    return "_".join(["cache_write", *(str(dtype).removeprefix("torch.") for dtype in (key_dtype, cache_dtype))])


@cache
def _kernel(name: str, device_index: int) -> Kernel:
    params = read_params(source_of("cache_write"), "CacheWriteParams")
    return load_kernel(fatbin("cache_write"), name, params, THREADS, device_index)
