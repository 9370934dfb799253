"""The feed-forward sublayers: one gated MLP for all tokens, or a few experts per token."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from quire.kernels.common.mxfp4 import GROUP_BYTES, GROUP_SIZE, largest_scale
from quire.kernels.common.scaled_linear import round_to_fp8
from quire.kernels.cpu.linear.linear import PackedLinear
from quire.kernels.cpu.native.library import load_native
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import MoeConfig
from quire.worker_proc.models.additions import ExpertAdditions
from quire.worker_proc.models.expert_gate import ExpertGate
from quire.worker_proc.models.formats.stacked import stack_experts
from quire.worker_proc.models.linear import Linear, bias_slot, in_tiles
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.ops import Experts, Product, expert_weight
from quire.worker_proc.models.weight_slot import Cut, WeightSlot
from quire.worker_proc.models.weights import Build, Projection, Rows

DUMMY_SCALE = 120
"""2 ** -7: random codes of MXFP4, whose standard deviation is 2.9, become numbers with 0.023."""


class GatedMlp(Module):
    """``down(activation(gate(x)) * up(x))``, sharded by its width.

    Args:
        name: name below the layer.
        width: by default the model's ``intermediate_size``.

    Raises:
        ConfigError: the width cannot be divided among the ranks.
    """

    def __init__(self, build: Build, name: str = "mlp", width: int = 0) -> None:
        config = build.config
        self.build = build
        hidden, named = config.hidden_size, "shared expert width" if width else "intermediate_size"
        width = width or config.intermediate_size
        part = build.share(named, width, build.format_of(f"{name}.down_proj"))
        halves = [Rows("gate", part, width), Rows("up", part, width)]
        self.gate_up = build.rows_linear(name + ".{}_proj", halves, hidden, config.mlp_bias)
        self.down = build.columns_linear(f"{name}.down_proj", hidden, part, width, config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape, summed over the ranks."""
        return self.build.parallel.all_reduce(self.own_share(x))

    def own_share(self, x: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to the sum."""
        gated = self.build.ops.gate(self.gate_up(x), self.build.config.activation)
        return self.down(gated)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self.gate_up.weight_slots() | self.down.weight_slots()


class SparseMlp(Module):
    """Mixture of experts, each expert sharded by its width; every rank routes every token.

    Experts in MXFP4 stay packed, and are sharded in whole groups of 32 columns. Experts in other formats are pairs of
    ``QuantisedLinear`` or ``BlockLinear``; in a GGUF file of mixed types some layers of a pair may be plain.

    Raises:
        ConfigError: an expert's width cannot be divided among the ranks, or the hidden size into MXFP4's groups.
    """

    def __init__(self, build: Build, moe: MoeConfig) -> None:
        self.build = build
        self.moe = moe
        hidden, count = build.config.hidden_size, moe.num_experts
        name, total = "expert width", moe.intermediate_size
        forms = [build.format_of(f"mlp.experts.0.{part}_proj") for part in ("down", "gate", "up")]
        self.part = build.share_of_groups(name, total, GROUP_SIZE) if moe.mxfp4 else build.share(name, total, forms[0])
        width = self.part.stop - self.part.start
        self.gate = None if moe.is_plain else ExpertGate(build, moe)
        route = build.ops.route if self.gate is None else self.gate.route
        self.route = route if build.routes is None else build.routes.recording(route)
        self.router = (
            build.rows_linear("mlp.{}", [Rows("gate", slice(0, count), count)], hidden, moe.bias, plain=True)
            if self.gate is None
            else self.gate
        )
        self.shared = GatedMlp(build, "mlp.shared_experts", moe.shared_width) if moe.shared_width else None
        additions = self._additions()
        self.quantised: Sequence[tuple[Projection, Projection]] = ()
        if any(form is not None for form in forms):
            self.quantised = [self._quantised_expert(expert) for expert in range(count)]
            self.linears = [linear for pair in self.quantised for linear in pair]
            empty = torch.empty(0, device=build.device)
            stacked, rounds = None, None
            if build.ops.stacks_experts:
                first, second = zip(*self.quantised, strict=True)
                where = f"{build.layer}.mlp.experts"
                stacked = stack_experts(first, where), stack_experts(second, where)
                if forms[0] is not None and forms[0].fp8_activations:  # scales of the checkpoint differ between experts
                    rounds = partial(round_to_fp8, group_size=forms[0].activation_group)
            self.experts = Experts(
                empty,
                empty,
                activation=moe.activation,
                packed=self.quantised,
                stacked=stacked,
                round_inputs=rounds,
                additions=additions,
            )
            return
        self.gate_up, self.gate_up_scales = self._matrices(2 * width, hidden)
        self.down, self.down_scales = self._matrices(hidden, width)
        self.gate_up_bias = build.weight(count, 2 * width) if moe.bias else None
        self.down_bias = build.weight(count, hidden) if moe.bias and build.parallel.rank == 0 else None
        self.experts = Experts(
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            moe.activation,
            gate_up_scales=self.gate_up_scales,
            down_scales=self.down_scales,
            additions=additions,
        )

    def _additions(self) -> ExpertAdditions | None:
        """Make the additions of the experts, if gates and ups are separate."""
        added, moe, hidden = self.build.additions, self.moe, self.build.config.hidden_size
        if added is None or moe.activation == "swiglu_oai":
            return None
        whole, width, layer = slice(0, hidden), moe.intermediate_size, self.build.layer
        pairs = []
        for expert in range(moe.num_experts):
            name = f"mlp.experts.{expert}"
            halves = [Cut(f"{name}.{part}_proj", self.part, width, whole, hidden) for part in ("gate", "up")]
            down = Cut(f"{name}.down_proj", whole, hidden, self.part, width)
            pairs.append((added.at(layer, halves, routed=True), added.at(layer, [down], routed=True)))
        return added.at_experts(pairs)

    def _quantised_expert(self, expert: int) -> tuple[Projection, Projection]:
        build, name, width = replace(self.build, additions=None), f"mlp.experts.{expert}", self.moe.intermediate_size
        hidden, halves = build.config.hidden_size, [Rows("gate", self.part, width), Rows("up", self.part, width)]
        return (
            build.rows_linear(name + ".{}_proj", halves, hidden, bias=False),
            build.columns_linear(f"{name}.down_proj", hidden, self.part, width, bias=False),
        )

    def _matrices(self, outputs: int, inputs: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Allocate every expert's matrix, and the scales of MXFP4."""
        count, build = self.moe.num_experts, self.build
        if not self.moe.mxfp4:
            return build.weight(count, outputs, inputs), None
        if inputs % GROUP_SIZE:
            raise ConfigError(f"experts in MXFP4 need a hidden_size that is a multiple of {GROUP_SIZE} (got {inputs})")
        shape = (count, outputs, inputs // GROUP_SIZE)
        return build.weight(*shape, GROUP_BYTES, dtype=torch.uint8), build.weight(*shape, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape, summed over the ranks."""
        ops, moe = self.build.ops, self.moe
        expert_ids, weights = self.route(self.router(x), moe.num_experts_per_token, renormalise=moe.renormalise)
        if moe.scales_inputs:
            out = self._of_scaled_inputs(x, expert_ids, weights)
        else:
            out = ops.experts(x, self.experts, expert_ids, weights)
        if self.shared is not None:
            out += self.shared.own_share(x)
        return self.build.parallel.all_reduce(out)

    def _of_scaled_inputs(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum the outputs of the chosen experts, whose inputs are multiplied by ``weights`` (Llama 4).

        The first expert of each token, then the second: its rows are then those of the step, for which additions have
        adapters. Checkpoints have one expert per token.
        """
        whole, parts = torch.ones_like(weights[:, :1]), []
        for chosen in range(expert_ids.shape[1]):
            own = slice(chosen, chosen + 1)
            scaled = (x * weights[:, own]).to(x.dtype)
            parts.append(self.build.ops.experts(scaled, self.experts, expert_ids[:, own].contiguous(), whole))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def prepack(self, *, deterministic: bool) -> bool:
        """Prepack every expert as ``Linear.prepack`` does: all of them or none."""
        if self.experts.packed:
            return True
        packed = []
        for expert in range(self.moe.num_experts):
            first = self._layer(self.gate_up, self.gate_up_scales, self.gate_up_bias, expert, deterministic)
            second = self._layer(self.down, self.down_scales, self.down_bias, expert, deterministic)
            if first is None or second is None:
                return False
            packed.append((first, second))
        for name in ("gate_up", "down", "gate_up_scales", "down_scales"):
            if getattr(self, name) is not None:
                setattr(self, name, torch.nn.Parameter(self.gate_up.new_empty(0), requires_grad=False))
        additions = self.experts.additions
        self.experts = Experts(
            self.gate_up, self.down, activation=self.moe.activation, packed=packed, additions=additions
        )
        return True

    def _layer(
        self,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        biases: torch.Tensor | None,
        expert: int,
        deterministic: bool,
    ) -> Product | None:
        """Prepack one layer of an expert, or return None if no library accepts it."""
        bias = None if biases is None else biases.data[expert]
        if scales is None:
            layer = Linear(_frozen(weights.data[expert]), None if bias is None else _frozen(bias))
            return layer if layer.prepack(deterministic=deterministic) or deterministic else None
        native = load_native() if weights.is_cpu else None
        if native is not None:
            return PackedLinear.from_mxfp4(native, weights.data[expert], scales.data[expert], bias)
        dtype = self.build.activation_dtype

        def widened(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, expert_weight(weights, scales, expert, dtype), None if bias is None else bias.to(dtype))

        return in_tiles(widened, expert_weight(weights, scales, expert, dtype)) if deterministic else None

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Slots of each expert's projections under separate names, for every layout of the checkpoint."""
        hidden, width, count = self.build.config.hidden_size, self.moe.intermediate_size, self.moe.num_experts
        held = self.part.stop - self.part.start
        interleaved = self.moe.activation == "swiglu_oai"
        gates, ups = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, held), slice(held, None))
        slots = self.router.weight_slots()
        slots |= {} if self.shared is None else self.shared.weight_slots()
        for pair in self.quantised:
            slots |= pair[0].weight_slots() | pair[1].weight_slots()
        if self.quantised:
            return slots
        slots |= self._mxfp4_slots()
        for expert in range(count):
            name = f"mlp.experts.{expert}"
            columns = (slice(0, hidden), self.part)
            if not self.moe.mxfp4:
                slots[f"{name}.down_proj.weight"] = WeightSlot(self.down.data[expert], (hidden, width), columns)
            for part, rows in (("gate_proj", gates), ("up_proj", ups)):
                if not self.moe.mxfp4:
                    weight = self.gate_up.data[expert, rows]
                    slots[f"{name}.{part}.weight"] = WeightSlot(weight, (width, hidden), (self.part,))
                if self.gate_up_bias is not None:
                    bias = self.gate_up_bias.data[expert, rows]
                    slots[f"{name}.{part}.bias"] = WeightSlot(bias, (width,), (self.part,))
            if self.moe.bias:
                own = None if self.down_bias is None else self.down_bias.data[expert]
                slots[f"{name}.down_proj.bias"] = bias_slot(own, columns[0], hidden, self.down)
        return slots

    def _mxfp4_slots(self) -> dict[str, WeightSlot]:
        """Slots of the packed tensors, which hold all experts in the order in which they are computed."""
        if self.gate_up_scales is None or self.down_scales is None:
            return {}
        hidden, width, count = self.build.config.hidden_size, self.moe.intermediate_size, self.moe.num_experts
        rows = (slice(0, count), slice(2 * self.part.start, 2 * self.part.stop))
        groups = slice(self.part.start // GROUP_SIZE, self.part.stop // GROUP_SIZE)
        columns = (slice(0, count), slice(0, hidden), groups)
        slots = {}
        for name, outputs, inputs, blocks, scales, part in (
            ("gate_up_proj", 2 * width, hidden, self.gate_up, self.gate_up_scales, rows),
            ("down_proj", hidden, width, self.down, self.down_scales, columns),
        ):
            shape = (count, outputs, inputs // GROUP_SIZE)
            slots[f"mlp.experts.{name}_blocks"] = WeightSlot(blocks.data, (*shape, GROUP_BYTES), part, dtypes=("U8",))
            slots[f"mlp.experts.{name}_scales"] = WeightSlot(
                scales.data, shape, part, dtypes=("U8",), check=self._wrong_scale, dummy=DUMMY_SCALE
            )
        return slots

    def _wrong_scale(self, scales: torch.Tensor) -> str | None:
        """Return what is wrong with scales of MXFP4 with which a number is NaN or infinite in the model's dtype."""
        limit, dtype = largest_scale(self.build.dtype), str(self.build.dtype).removeprefix("torch.")
        largest = int(scales.max())
        return f"has a scale of {largest}; numbers are finite in {dtype} up to {limit}" if largest > limit else None


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
