"""The time of steps of several engines that share the experts of their model.

Each rank has its part of every layer's experts. The engines step together: before the experts of a layer, each rank
gathers the tokens of all engines; after them, each engine gets the sums of its tokens (vLLM's backend
``allgather_reducescatter``). An engine without a step takes part with one token. Steps that all fit a captured graph
are padded to the largest of them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import DTYPE_BYTES
from quire.protocol.model.model_config import ModelConfig
from quire.replay.costs.layers import LayerProfileCost, read_experts, read_profile
from quire.replay.costs.link import Interconnect
from quire.replay.costs.sizes import expert_layers, num_experts_read
from quire.replay.run.step_shape import StepShape

NOTHING = StepShape([], 1, 1, 1, 1)
"""The step of an engine that has nothing to compute."""


class ExpertParallelCost(LayerProfileCost):
    """The time of a step of all engines: the slowest engine's layers, the exchange of tokens, and the experts.

    Experts are chosen evenly: each rank computes an equal part of all choices. The profile of experts has the choices
    of a rank that has them all, so a rank's part is that of as many tokens as it has choices for.
    """

    def __init__(
        self, folder: Path, model: ModelConfig | None, ranks: int, num_engines: int, max_num_seqs: int | None = None
    ) -> None:
        """
        Args:
            model: None: the model named by ``profile_meta.yaml``.
            ranks: tensor-parallel degree of each engine.
            max_num_seqs: as of ``read_profile``.

        Raises:
            ConfigError: a model without experts, or a missing or invalid file.
        """
        profile = read_profile(folder, model, ranks, max_num_seqs)
        self._model: ModelConfig = profile["model"]
        if not expert_layers(self._model):
            raise ConfigError(f"{folder}: enable_expert_parallel needs a model with experts")
        super().__init__(folder, **profile, with_experts=False)
        self._captured: list[int] = profile["captured"]
        self._link: Interconnect = profile["link"]
        self._num_engines, self._num_parts = num_engines, num_engines * ranks
        self._experts = read_experts(folder, 1)
        self._description += f", experts over {self._num_parts} ranks linked by {self._link.bandwidth / 1e9:g} GB/s"

    def seconds(self, step: StepShape) -> float:
        return self.seconds_together([step, *[NOTHING] * (self._num_engines - 1)])

    def seconds_together(self, steps: Sequence[StepShape]) -> float:
        """Return the seconds of one step of each engine, ``NOTHING`` of those without one."""
        counts = [step.num_tokens for step in steps]
        most, captured = max(counts), self._captured
        if captured and most <= captured[-1]:
            most = captured[bisect_left(captured, most)]
            counts = [most] * len(steps)
        slowest = max(self.seconds_at(step, tokens) for step, tokens in zip(steps, counts, strict=True))
        return slowest + expert_layers(self._model) * (
            self._exchange(sum(counts) / len(counts)) + self._expert_seconds(sum(counts))
        )

    def _exchange(self, num_tokens: float) -> float:
        """Return the seconds to gather hidden states and router scores of a layer's tokens, and to return the sums.

        ``num_tokens`` is the mean of the engines: directions share the link, as of chips that send through the host.
        """
        model, link = self._model, self._link
        scores = model.moe.num_experts if model.moe is not None else 0
        token_bytes = DTYPE_BYTES[model.dtype]
        gather = link.all_gather(num_tokens * (model.hidden_size + scores) * token_bytes, self._num_engines)
        return gather + link.all_gather(num_tokens * model.hidden_size * token_bytes, self._num_engines)

    def _expert_seconds(self, num_tokens: int) -> float:
        """Return the seconds of one layer's experts of a rank, for the tokens of all engines."""
        parts = self._num_parts
        return self._experts.at(num_tokens / parts, num_experts_read(self._model, num_tokens) / parts) * 1e-6
