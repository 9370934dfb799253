"""Linear layers over a ``ScaledWeight`` on a GPU: codes are read as they are stored, and decoded in registers.

The reference is ``scaled_linear_reference`` (``kernels/common/scaled_linear.py``). Codes are exact in 16 bits. They are
multiplied by the activations, and each group's sum by the group's scale, so that only float32 sums are rounded.
"""

import math
from collections.abc import Callable

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.launches import Launch, launch_nothing, layout_of, once_per_layout
from quire.kernels.common.scaled_weight import CODE_BITS, CODE_DTYPES, ScaledWeight
from quire.kernels.common.triton_runtime import require_launchable

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = {"int8": 0, "int4": 1, "fp8": 2}
MIN_GROUP_SIZE = 32
"""Half of the inputs of an int4 tile are 16, the least that matrix instructions take."""

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Allowed difference from the reference, relative to the sum of the products' magnitudes: one rounding to the dtype,
and the order of a float32 sum."""


def packed_linear(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None, *, deterministic: bool = False
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` by a Triton kernel, ``[rows, inputs]`` → ``[rows, outputs]`` of ``x``'s dtype.

    Can be captured in a CUDA graph. The result is the same in every run.

    Args:
        x: float32, float16 or bfloat16, rows may be strided.
        weight: one that ``accepts``.
        bias: float32, float16 or bfloat16 ``[outputs]``, or None.
        deterministic: use the tiles of few rows for any number, so that a row's bits do not depend on the other rows.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device, or the weight is not accepted.
        RuntimeError: Triton cannot launch here.
    """
    codes = stored_codes(weight)
    tensors = x, codes, weight.scales, weight.zeros, bias
    layouts = (*map(layout_of, (*tensors, weight.row_scales, weight.input_groups)), weight.kind, weight.group_size)
    launch = _prepare((layouts, deterministic), x, weight, bias, deterministic)
    out = x.new_empty(len(x), len(codes))
    launch(*tensors, out)
    return out


def stored_codes(weight: ScaledWeight) -> torch.Tensor:
    """Return the codes as kernels take them: fp8 as bytes, because Triton does not read 8-bit floats on all GPUs."""
    return weight.codes.view(torch.uint8) if weight.kind == "fp8" else weight.codes


def accepts(weight: ScaledWeight) -> bool:
    """Whether the kernel computes this form: one group, or consecutive ones of a multiple of 32 inputs."""
    return (
        weight.kind in KINDS
        and weight.scales.dtype in DTYPES
        and weight.row_scales is None
        and weight.input_groups is None
        and (weight.scales.shape[1] == 1 or weight.group_size % MIN_GROUP_SIZE == 0)
    )


@once_per_layout
def _prepare(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None, deterministic: bool
) -> Callable[..., None]:
    """Check the arguments of ``packed_linear`` and return its launch."""
    outputs, inputs = weight.shape
    check_tensor("x", x, {"rows": None, "inputs": inputs}, DTYPES, x.device)
    check_weight("weight", weight, (outputs, inputs), x.device)
    if bias is not None:
        check_tensor("bias", bias, {"outputs": outputs}, DTYPES, x.device)
    require_launchable(x.device.type)
    if len(x) == 0 or outputs == 0:
        return launch_nothing
    from quire.kernels.dense.packed_linear_triton import packed_linear_kernel

    constants = weight_constants(weight, x.dtype, 1 if deterministic else len(x))
    grid = -(-len(x) // constants["TILE_ROWS"]), -(-outputs // constants["TILE_COLUMNS"])
    last = len(x), outputs, inputs, weight.scales.shape[1], x.stride(0), weight.codes.stride(0)
    options = {"HAS_BIAS": int(bias is not None)} | launch_options(constants["TILE_ROWS"])
    return Launch(packed_linear_kernel, grid, last, constants | options)


def weight_constants(weight: ScaledWeight, dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Return the compile-time constants of a product with ``rows`` rows of activations."""
    size = weight.group_size if weight.scales.shape[1] > 1 else 0
    constants = launch_constants(weight.kind, dtype, rows, weight.shape[1], size)
    return constants | {"HAS_ZEROS": int(weight.zeros is not None)}


def launch_constants(kind: str, dtype: torch.dtype, rows: int, inputs: int, group_size: int) -> dict[str, int]:
    """Compile-time constants of a launch; shared with the test that compiles them ahead of time.

    The tiles are estimates. With few rows, narrow tiles keep more programs reading, and long ones more bytes in flight.

    Args:
        group_size: 0 for one group.
    """
    tile_rows = 16 if rows <= 16 else 64 if rows <= 64 or dtype == torch.float32 else 128
    wide = 128 if tile_rows == 16 else 64
    tile_inputs = math.gcd(group_size, wide) if group_size else wide
    return {
        "KIND": KINDS[kind],
        "GROUP_SIZE": group_size,
        "MASKED": int(inputs % tile_inputs != 0),
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": 32 if tile_rows == 16 or dtype == torch.float32 else 64,
        "TILE_INPUTS": tile_inputs,
    }


def launch_options(tile_rows: int) -> dict[str, int]:
    """Return the warps that share the accumulators, and the pipeline stages of tiles in flight."""
    return {"num_warps": 8 if tile_rows == 128 else 4, "num_stages": 4 if tile_rows == 16 else 3}


def check_weight(name: str, weight: ScaledWeight, shape: tuple[int, int], device: torch.device) -> None:
    """Raise ValueError unless the weight has this shape and a form that ``accepts``."""
    if not accepts(weight):
        raise ValueError(
            f"{name}: expected {', '.join(KINDS)} with one group or consecutive groups of a multiple of "
            f"{MIN_GROUP_SIZE} inputs, and 16-bit or float32 scales (got {weight.kind} in groups of "
            f"{weight.group_size}, {weight.scales.dtype} scales)"
        )
    outputs, inputs = shape
    size, groups = weight.group_size, weight.scales.shape[1]
    stored = inputs * CODE_BITS[weight.kind] // 8
    kinds = (CODE_DTYPES[weight.kind],)
    check_tensor(f"{name}: codes", weight.codes, {"outputs": outputs, "stored": stored}, kinds, device)
    dims = {"outputs": outputs, "groups": groups if groups == 1 else inputs // size}
    check_tensor(f"{name}: scales", weight.scales, dims, DTYPES, device)
    if groups > 1 and inputs % size:
        raise ValueError(f"{name}: {inputs} inputs, expected a multiple of the group size {size}")
    if weight.zeros is not None:
        check_tensor(f"{name}: zeros", weight.zeros, dims, (torch.int8,), device)
    for part, tensor in (("scales", weight.scales), ("zeros", weight.zeros)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name}: {part}: expected a contiguous tensor, strides are {tensor.stride()}")
