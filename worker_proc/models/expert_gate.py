"""The choice of experts by groups, or by sigmoids with a bias, as in DeepSeek V2 and V3."""

import torch

from quire.protocol.model.model_config import MoeConfig
from quire.worker_proc.models.linear import Linear
from quire.worker_proc.models.module import Module
from quire.worker_proc.models.weight_slot import Cut, WeightSlot
from quire.worker_proc.models.weights import Build

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by: sigmoids may all be 0."""


class ExpertGate(Module):
    """Scores of a layer's experts, and the choice among them.

    Scores are float32 sums: rounded to 16 bits, many of the 256 experts of a layer would tie.
    """

    def __init__(self, build: Build, moe: MoeConfig) -> None:
        self.moe = moe
        count, hidden = moe.num_experts, build.config.hidden_size
        cut = Cut("mlp.gate", slice(0, count), count, slice(0, hidden), hidden)
        self.scores = Linear(build.weight(count, hidden), float32_output=True, cuts=[cut])
        self.bias = build.weight(count, dtype=torch.float32) if moe.sigmoid else None

    def route(self, logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Ops.route``, of the best groups only.

        With sigmoids, the bias takes part in the choice and not in the weights, and a group is as good as its two best
        experts (arXiv 2412.19437, section 2.1.2). With softmaxes it is as good as its best one (arXiv 2405.04434,
        section 2.1.3).
        """
        moe = self.moe
        scores = logits.sigmoid() if self.bias is not None else logits.softmax(-1)
        ranked = scores if self.bias is None else scores + self.bias
        if moe.num_groups > 1:
            by_group = ranked.view(len(ranked), moe.num_groups, -1)
            of_groups = by_group.sort(dim=-1, descending=True).values[..., : 2 if moe.sigmoid else 1].sum(-1)
            best = of_groups.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_groups]
            others = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, best, False)
            ranked = by_group.masked_fill(others[..., None], float("-inf")).flatten(1)
        chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(-1, chosen)
        if renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
        return chosen.int(), weights * moe.scaling_factor

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = self.scores.weight_slots()
        if self.bias is not None:
            slots["mlp.gate.e_score_correction_bias"] = WeightSlot(self.bias.data, (self.moe.num_experts,), ())
        return slots
