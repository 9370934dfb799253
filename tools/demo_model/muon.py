"""The Muon optimizer in float32: momentum with an update orthogonalized by Newton-Schulz iterations.

torch's own Muon iterates in bfloat16, which takes longer than the whole training step on a CPU without bfloat16
instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def _orthogonal(updates: Tensor) -> Tensor:
    """Return the approximately nearest (semi-)orthogonal matrices of a stack of matrices at least as wide as high."""
    a, b, c = COEFFICIENTS
    out: Tensor = updates / (updates.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = out @ out.mT
        out = a * out + (b * gram + c * gram @ gram) @ out
    return out


class Muon:
    """Updates the given matrices; matrices of one shape are processed together."""

    def __init__(self, matrices: Iterable[Tensor], momentum: float = 0.95) -> None:
        self._momentum = momentum
        self._groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            self._groups[matrix.shape].append(matrix)
        self._buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update, scaled to the root mean square of an AdamW update."""
        for shape, group in self._groups.items():
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer = self._buffers[shape].lerp_(gradients, 1 - self._momentum)
            updates = gradients.lerp(buffer, self._momentum)
            tall = shape[0] > shape[1]
            updates = _orthogonal(updates.mT if tall else updates)
            scale = rate * 0.2 * max(shape) ** 0.5
            for matrix, update in zip(group, updates.mT if tall else updates, strict=True):
                matrix.sub_(update, alpha=scale)
