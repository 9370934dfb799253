"""The choice of experts by groups, or by sigmoids with a bias, as in DeepSeek V2 and V3, and that of Llama 4."""

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
        self._addition = None if build.additions is None else build.additions.at(build.layer, [cut])
        self.bias = build.weight(count, dtype=torch.float32) if moe.sigmoid else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of all experts before ``route``: ``[num_tokens, hidden_size]`` → float32."""
        logits = self.scores(x)
        if self._addition is not None:
            added = torch.zeros_like(logits, dtype=x.dtype)  # additions have the dtype of the activations
            self._addition.add(x, added)
            logits += added
        return logits

    def route(self, logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Ops.route``, of the best groups only.

        With sigmoids, the bias takes part in the choice and not in the weights, and a group is as good as its two best
        experts (arXiv 2412.19437, section 2.1.2). With softmaxes it is as good as its best one (arXiv 2405.04434,
        section 2.1.3).
        """
        moe = self.moe
        scores = _sigmoids(logits) if moe.sigmoid or moe.scales_inputs else logits.softmax(-1)
        # Sigmoids of large scores are equal, and the scores are not.
        ranked = logits if moe.scales_inputs else scores if self.bias is None else scores + self.bias
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


def _sigmoids(logits: torch.Tensor) -> torch.Tensor:
    """Return the sigmoids, each as the first of two softmaxes: torch computes those row by row, but the sigmoids of the
    last few elements of a tensor by another code path than the rest, so that a row's bits would depend on its batch.
    """
    return torch.stack((logits, torch.zeros_like(logits)), -1).softmax(-1)[..., 0]
