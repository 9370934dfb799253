"""One block of an encoder: bidirectional attention and a feed-forward layer, with norms before or after each."""

from collections.abc import Sequence

import torch

from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention, Rotary
from quire.worker_proc.attention.whole_rows import RowsPart
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import Cut, WeightSlot
from quire.worker_proc.models.weights import Build


class Norm(Module):
    """A layer norm, with a bias if ``bias`` is set."""

    def __init__(self, build: Build, name: str, eps: float, *, bias: bool) -> None:
        self._build, self._name, self._eps = build, name, eps
        self.weight = build.norm()
        self.bias = build.norm() if bias else None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, *, keeps_sum: bool = False
    ) -> torch.Tensor:
        """Normalise ``x + residual``, as ``Ops.layer_norm`` does."""
        ops = self._build.ops
        return ops.layer_norm(x, self.weight, self.bias, self._eps, residual, keeps_sum=keeps_sum)

    def weight_slots(self) -> dict[str, WeightSlot]:
        width = (len(self.weight),)
        slots = {f"{self._name}.weight": WeightSlot(self.weight.data, width)}
        if self.bias is not None:
            slots[f"{self._name}.bias"] = WeightSlot(self.bias.data, width)
        return slots


def linear(
    build: Build,
    names: Sequence[str],
    outputs: int,
    inputs: int,
    *,
    bias: bool,
    activation: str = "",
    float32_output: bool = False,
) -> Linear:
    """Allocate projections of ``outputs`` outputs each as one layer."""
    cuts = [Cut(name, slice(0, outputs), outputs, slice(0, inputs), inputs) for name in names]
    total = outputs * len(names)
    return Linear(
        build.weight(total, inputs),
        build.weight(total) if bias else None,
        float32_output=float32_output,
        cuts=cuts,
        stored_bias=bias,
        activation=activation,
    )


class EncoderLayer(Module):
    """One block."""

    def __init__(self, build: Build, layer: int) -> None:
        config, encoder = build.config, build.config.encoder
        assert encoder is not None
        hidden, width = config.hidden_size, config.intermediate_size
        self._build, self._before, self._gated = build, encoder.norms_before, encoder.gated
        self.rope = "local" if layer in config.local_rope_layers else ""
        names = [f"self_attn.{part}_proj" for part in "qkv"]
        self.qkv = linear(build, names, hidden, hidden, bias=config.qkv_bias)
        self.o = linear(build, ["self_attn.o_proj"], hidden, hidden, bias=config.o_bias)
        bias = config.mlp_bias
        if self._gated:
            self.up = linear(build, ["mlp.gate_proj", "mlp.up_proj"], width, hidden, bias=bias)
        else:
            self.up = linear(build, ["mlp.up_proj"], width, hidden, bias=bias, activation=config.activation)
        self.down = linear(build, ["mlp.down_proj"], hidden, width, bias=bias)
        # The embeddings of a model with norms before its sublayers are normalised already.
        self.attn_norm: Norm | None = None
        if layer or not self._before:
            self.attn_norm = Norm(build, "attn_norm", encoder.norm_eps, bias=encoder.norm_bias)
        self.mlp_norm = Norm(build, "mlp_norm", encoder.norm_eps, bias=encoder.norm_bias)
        self.spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            reach=encoder.reach[layer],
        )

    def __call__(
        self,
        residual: torch.Tensor,
        pending: torch.Tensor | None,
        part: RowsPart,
        backend: LayerAttention,
        rotary: Rotary | None,
        *,
        firsts_only: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the block.

        Args:
            residual: ``[num_tokens, hidden_size]``; changed if norms are before the sublayers.
            pending: with norms before the sublayers, what the block before has yet to add to ``residual``.
            firsts_only: return the results of each row's first token only, ``[num_rows, hidden_size]``.

        Returns:
            The next block's ``residual`` and ``pending``.
        """
        if not self._before:
            assert self.attn_norm is not None
            x = self._attended(residual, part, backend, rotary, firsts_only)
            x = self.attn_norm(x, residual[part.firsts] if firsts_only else residual)
            return self.mlp_norm(self._fed_forward(x), x), None
        x = residual
        if self.attn_norm is not None:
            assert pending is not None
            x = self.attn_norm(pending, residual, keeps_sum=True)
        x = self._attended(x, part, backend, rotary, firsts_only)
        residual = residual[part.firsts] if firsts_only else residual
        x = self.mlp_norm(x, residual, keeps_sum=True)
        return residual, self._fed_forward(x)

    def _attended(
        self, x: torch.Tensor, part: RowsPart, backend: LayerAttention, rotary: Rotary | None, firsts_only: bool
    ) -> torch.Tensor:
        spec = self.spec
        qkv = self.qkv(x).view(len(x), 3 * spec.num_heads, spec.head_dim)
        attended = backend.attend(qkv, qkv, part, spec, rotary).view(len(x), -1)
        return self.o(attended[part.firsts] if firsts_only else attended)

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        return self.down(self._build.ops.gate(up, self._build.config.activation) if self._gated else up)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of this layer's checkpoint tensors, by name under ``model.layers.N.``."""
        slots: dict[str, WeightSlot] = {}
        for part in (self.qkv, self.o, self.up, self.down, self.attn_norm, self.mlp_norm):
            slots |= {} if part is None else part.weight_slots()
        return slots
