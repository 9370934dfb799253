"""The Triton kernel of ``sampling_noise.uniform``. Imports triton, so only that launcher imports it."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform_kernel(seeds, positions, noise, num_rows, TILE_ROWS: tl.constexpr):
    """Program ``i`` computes the ``i``-th TILE_ROWS rows."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_rows = row < num_rows
    seed = tl.load(seeds + row, mask=in_rows, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row, mask=in_rows, other=0).to(tl.uint64)
    z = mix(seed + 0x9E3779B97F4A7C15 * (position + 1))
    z = mix(z ^ seed)
    tl.store(noise + row, (z >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=in_rows)  # 2**-53
