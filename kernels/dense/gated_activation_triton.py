"""The Triton kernel of ``gated_activation.gate``, and the activation function that ``fused_experts`` inlines.

Imports triton, so only the launchers and kernels import it.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Sigmoid without the overflow of ``exp(-x)``; NaN stays NaN."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """Apply the activation with number ACTIVATION (``gated_activation.ACTIVATIONS``) to two float32 tiles."""
    if ACTIVATION == 0:
        return gate * sigmoid(gate) * up
    elif ACTIVATION == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == 2:
        # (1 + tanh(z)) / 2 is sigmoid(2 z); 1.5957... is 2 * sqrt(2 / pi).
        return gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        # Not tl.minimum, which turns NaN into the limit.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * gate * sigmoid(1.702 * gate)


@triton.jit
def gated_activation_kernel(
    gate_up, out, width, gate_up_stride, out_stride,
    ACTIVATION: tl.constexpr, TILE_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Program ``(t, i)`` computes tile ``i`` of token ``t``."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * TILE_ELEMENTS + tl.arange(0, TILE_ELEMENTS)
    in_width = element < width
    row = gate_up + token * gate_up_stride
    if ACTIVATION == 3:
        pair = row + 2 * element[:, None] + tl.arange(0, 2)[None, :]
        gate, up = tl.split(tl.load(pair, mask=in_width[:, None], other=0.0).to(tl.float32))
    else:
        gate = tl.load(row + element, mask=in_width, other=0.0).to(tl.float32)
        up = tl.load(row + width + element, mask=in_width, other=0.0).to(tl.float32)
    result = activate(gate, up, ACTIVATION)
    tl.store(out + token * out_stride + element, result.to(out.dtype.element_ty), mask=in_width)
