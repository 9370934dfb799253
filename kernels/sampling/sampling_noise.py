"""One random number per sampled token, a pure function of the request's seed and the token's position."""

from typing import Any

import torch

from quire.kernels.common.checks import check_tensor
from quire.kernels.common.triton_runtime import require_launchable

SEED_DTYPES = (torch.uint64, torch.int64)

TILE_ROWS = 128


def uniform_reference(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Reference of ``uniform``, in Python integers."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    numbers = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        z = mix((seed + 0x9E3779B97F4A7C15 * (position + 1)) & mask)
        numbers.append((mix(z ^ (seed & mask)) >> 11) * 2.0**-53)
    return torch.tensor(numbers, dtype=torch.float64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each (seed, position), by two rounds of SplitMix64's finaliser.

    Source: Steele et al., 2014. The result equals that of the engine's CPU implementation bit by bit.

    Args:
        seeds: ``[num_rows]`` uint64, or int64 with the same bits.
        positions: ``[num_rows]`` int32 or int64.

    Returns:
        float64 ``[num_rows]``.

    Raises:
        ValueError: a tensor does not have this shape, dtype or device.
        RuntimeError: Triton cannot launch here.
    """
    check_tensor("seeds", seeds, {"num_rows": None}, SEED_DTYPES, seeds.device)
    dims = {"num_rows": len(seeds)}
    check_tensor("positions", positions, dims, (torch.int32, torch.int64), seeds.device)
    noise = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    kernel = _kernel(seeds.device)
    if len(seeds) > 0:
        grid = (-(-len(seeds) // TILE_ROWS),)
        kernel[grid](seeds.view(torch.int64), positions, noise, len(seeds), TILE_ROWS=TILE_ROWS)
    return noise


def _kernel(device: torch.device) -> Any:
    require_launchable(device.type)
    from quire.kernels.sampling.sampling_noise_triton import uniform_kernel

    return uniform_kernel
