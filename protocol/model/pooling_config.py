"""How a checkpoint turns hidden states into vectors and scores, as every process needs it."""

from typing import Literal

import msgspec

from quire.protocol.request.pooling_params import PoolingTask


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pooling of a model, from its files or flags.

    Attributes:
        tasks: what requests may ask for.
        pooling: the hidden state that a vector or classification is made of: that of the last token, the mean of all,
            or that of the first token.
        normalize: vectors are normalised to length 1.
        size: entries of a vector.
        matryoshka_dimensions: the numbers of entries to which a vector may be cut; empty: any up to ``size``.
        labels: names of the labels of a classification, in their order; empty without one.
        activation: of a classification, unless a request switches it off.
        label_token_ids: the tokens whose logits are those of a classification (Qwen3-Reranker: no and yes, of which
            the probability of the last one is the score); empty: the model has a head for it.
        max_tokens: longest prompt that the model was made for; 0: as long as its context.
        prompts: texts that are put before an input, by name; ``default_prompt`` is the name of the one that is used
            where a request names none, or "".
    """

    tasks: list[PoolingTask]
    pooling: Literal["last", "mean", "cls"] = "last"
    normalize: bool = True
    size: int
    matryoshka_dimensions: list[int] = []
    labels: list[str] = []
    activation: Literal["", "sigmoid", "softmax"] = ""
    label_token_ids: list[int] = []
    max_tokens: int = 0
    prompts: dict[str, str] = {}
    default_prompt: str = ""

    def needs_every_token(self, task: PoolingTask) -> bool:
        """Whether the hidden states of all tokens of a prompt are needed, so that none may come from a cache."""
        return task == "token_embed" or self.pooling != "last"

    def width(self, task: PoolingTask, dimensions: int = 0) -> int:
        """Return the number of values of one row of a result."""
        if task == "classify":
            return 1 if self.label_token_ids else len(self.labels)
        return min(dimensions or self.size, self.size)
