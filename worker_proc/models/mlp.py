"""The feed-forward sublayers: one gated MLP for all tokens, or a few experts per token."""

from dataclasses import replace

import torch

from quire.protocol.model.model_config import MoeConfig
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.ops import Experts
from quire.worker_proc.models.weights import Build, Rows, WeightSlot, column_slots, row_slots, summed_bias_slot


class GatedMlp(torch.nn.Module):
    """``down(activation(gate(x)) * up(x))``, sharded by its width.

    Raises:
        ConfigError: the width cannot be divided among the ranks.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.build = build
        self.part = build.share("intermediate_size", config.intermediate_size)
        width = self.part.stop - self.part.start
        self.gate_up = build.linear(2 * width, config.hidden_size, config.mlp_bias)
        self.down = build.summed_linear(config.hidden_size, width, config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape, summed over the ranks."""
        build = self.build
        gated = build.ops.gate(self.gate_up(x), build.config.activation)
        return build.parallel.all_reduce(self.down(gated))

    __call__ = forward

    def weight_slots(self) -> dict[str, WeightSlot]:
        config = self.build.config
        width = config.intermediate_size
        slots = row_slots("mlp.{}_proj", self.gate_up, [Rows("gate", self.part, width), Rows("up", self.part, width)])
        return slots | column_slots("mlp.down_proj", self.down, self.part, width, config.mlp_bias)


class SparseMlp(torch.nn.Module):
    """Mixture of experts, each expert sharded by its width; every rank routes every token.

    Raises:
        ConfigError: an expert's width cannot be divided among the ranks.
    """

    def __init__(self, build: Build, moe: MoeConfig) -> None:
        super().__init__()
        self.build = build
        self.moe = moe
        hidden, count = build.config.hidden_size, moe.num_experts
        self.part = build.share("expert width", moe.intermediate_size)
        width = self.part.stop - self.part.start
        self.router = build.linear(count, hidden, moe.bias)
        self.gate_up = build.weight(count, 2 * width, hidden)
        self.down = build.weight(count, hidden, width)
        self.gate_up_bias = build.weight(count, 2 * width) if moe.bias else None
        self.down_bias = build.weight(count, hidden) if moe.bias and build.parallel.rank == 0 else None
        self.experts = Experts(
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            moe.activation,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape, summed over the ranks."""
        ops, moe = self.build.ops, self.moe
        expert_ids, weights = ops.route(self.router(x), moe.num_experts_per_token, renormalise=moe.renormalise)
        return self.build.parallel.all_reduce(ops.experts(x, self.experts, expert_ids, weights))

    __call__ = forward

    def prepack(self, *, deterministic: bool) -> bool:
        """Prepack every expert as ``Linear.prepack`` does: all of them or none."""
        if self.experts.packed:
            return True
        packed = []
        for expert in range(self.moe.num_experts):
            layers = (
                _layer(self.gate_up, self.gate_up_bias, expert),
                _layer(self.down, self.down_bias, expert),
            )
            if not all(layer.prepack(deterministic=deterministic) for layer in layers):
                return False
            packed.append(layers)
        for name in ("gate_up", "down"):
            setattr(self, name, torch.nn.Parameter(self.gate_up.new_empty(0), requires_grad=False))
        self.experts = replace(self.experts, gate_up=self.gate_up, down=self.down, packed=packed)
        return True

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of each expert's projections under separate names, for every layout of the checkpoint."""
        hidden, width, count = self.build.config.hidden_size, self.moe.intermediate_size, self.moe.num_experts
        held = self.part.stop - self.part.start
        interleaved = self.moe.activation == "swiglu_oai"
        gates, ups = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, held), slice(held, None))
        slots = row_slots("mlp.{}", self.router, [Rows("gate", slice(0, count), count)])
        for expert in range(count):
            name = f"mlp.experts.{expert}"
            columns = (slice(0, hidden), self.part)
            slots[f"{name}.down_proj.weight"] = WeightSlot(self.down.data[expert], (hidden, width), columns)
            for part, rows in (("gate_proj", gates), ("up_proj", ups)):
                weight = self.gate_up.data[expert, rows]
                slots[f"{name}.{part}.weight"] = WeightSlot(weight, (width, hidden), (self.part,))
                if self.gate_up_bias is not None:
                    bias = self.gate_up_bias.data[expert, rows]
                    slots[f"{name}.{part}.bias"] = WeightSlot(bias, (width,), (self.part,))
            if self.moe.bias:
                own = None if self.down_bias is None else self.down_bias.data[expert]
                slots[f"{name}.down_proj.bias"] = summed_bias_slot(own, hidden, self.down)
        return slots


def _layer(weights: torch.Tensor, biases: torch.Tensor | None, expert: int) -> Linear:
    weight = torch.nn.Parameter(weights.data[expert], requires_grad=False)
    return Linear(weight, None if biases is None else torch.nn.Parameter(biases.data[expert], requires_grad=False))
