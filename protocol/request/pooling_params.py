"""Parameters of a request that gets vectors or scores instead of tokens."""

import msgspec

from quire.protocol.errors import wrong_value
from quire.protocol.model.pooling_config import POOLING_TASKS as POOLING_TASKS
from quire.protocol.model.pooling_config import PoolingTask as PoolingTask
from quire.protocol.request.sampling_params import SamplingParams, check_int

MAX_DIMENSIONS = 2**20


class PoolingParams(msgspec.Struct, array_like=True, frozen=True):
    """What a prompt is turned into.

    Attributes:
        task: embed (one vector), token_embed (a vector for each token of the prompt) or classify (a number for each
            label of the model; a reranker has one label).
        dimensions: entries of a vector that are kept, the first ones; 0: all.
        use_activation: normalise vectors to length 1 if the model does, and apply the sigmoid or softmax of a
            classification. Otherwise the values are returned as the model's head computes them.
        second_text: index of the first token of the second text of a pair, for models that embed the two differently
            (BERT's token types); 0: one text.
        skip_reading_prefix_cache: compute the whole prompt, also what is cached of it.

    Raises:
        InvalidRequest: a field has a wrong type or is out of range.
    """

    task: PoolingTask = "embed"
    dimensions: int = 0
    use_activation: bool = True
    second_text: int = 0
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.task not in POOLING_TASKS:
            raise wrong_value("task", f"one of {', '.join(POOLING_TASKS)}", self.task)
        check_int("dimensions", self.dimensions, 0, MAX_DIMENSIONS)
        check_int("second_text", self.second_text, 0, 2**31 - 1)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise wrong_value(name, "true or false", getattr(self, name), "invalid_type")


NO_SAMPLING = SamplingParams(max_tokens=1)
"""Sampling parameters of requests with PoolingParams, which do not use them."""
