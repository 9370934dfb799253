"""How a checkpoint turns hidden states into vectors and scores, as every process needs it."""

from typing import Literal, TypeAlias, get_args

import msgspec

PoolingTask: TypeAlias = Literal["embed", "token_embed", "classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pooling of a model, from its files or flags.

    Attributes:
        tasks: what requests may ask for.
        pooling: the hidden state that a vector or classification is made of: that of the last token, the mean of all,
            or that of the first token.
        normalize: vectors are normalised to length 1.
        size: entries of a hidden state, and of a vector that is not cut.
        truncate_dim: entries that are left of a vector after its normalisation, unless a request asks for dimensions,
            which are cut before it; 0: all.
        matryoshka_dimensions: the numbers of entries to which a vector may be cut; empty: any up to the two above.
        labels: names of the labels of a classification, in their order; empty without one.
        activation: of a classification, unless a request switches it off.
        label_token_ids: one or two tokens: the logit of a classification's only label is that of the last token, less
            that of the other one (Qwen3-Reranker: no and yes, so that the sigmoid is the probability of yes). Empty:
            the model has a head for labels.
        max_tokens: longest prompt that the model was made for; 0: as long as its context.
        lowercase: texts are converted to lower case first.
        prompts: texts that are put before an input, by name.
        default_prompt: name of the prompt of requests that name none, or "".
        message_format: how a text is given to the chat template, as the message of a user after the prompt as a system
            message: as text, or as a list of one part; "": texts are not rendered.
        template_variables: for the chat template, such as ``add_generation_prompt``, which is otherwise false.
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
    lowercase: bool = False
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    message_format: Literal["", "flat", "structured"] = ""
    template_variables: dict[str, bool | int | str] = {}
    truncate_dim: int = 0

    def needs_every_token(self, task: PoolingTask) -> bool:
        """Whether the hidden states of all tokens of a prompt are needed, so that none may come from a cache."""
        return task == "token_embed" or self.pooling != "last"

    def width(self, task: PoolingTask, dimensions: int = 0) -> int:
        """Return the number of values of one row of a result."""
        if task == "classify":
            return 1 if self.label_token_ids else len(self.labels)
        return min(dimensions or (task == "embed" and self.truncate_dim) or self.size, self.size)

    def dimensions_allowed(self, dimensions: int) -> str:
        """Return "" if a vector may be cut to this number of entries, or which numbers are allowed."""
        most = self.truncate_dim or self.size
        if not self.matryoshka_dimensions:
            return "" if 1 <= dimensions <= most else f"an integer from 1 to {most}"
        sizes = sorted({*self.matryoshka_dimensions, most})
        return "" if dimensions in sizes else f"one of {', '.join(map(str, sizes))}"
