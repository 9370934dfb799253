"""Result types of requests for vectors and scores, with vLLM's names."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """The result of one prompt.

    Attributes:
        prompt: its text, or None for a prompt of token ids.
        outputs: None if it failed.
        error: the reason then; other prompts of the call are not affected.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: T | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    finished: bool = True


@dataclass(slots=True)
class EmbeddingOutput:
    """``embedding``: float32 ``[size]``."""

    embedding: npt.NDArray[np.float32]


@dataclass(slots=True)
class PoolingOutput:
    """``data``: float32 ``[rows, width]``: a row for each token with the task token_embed, otherwise one."""

    data: npt.NDArray[np.float32]


@dataclass(slots=True)
class ClassificationOutput:
    """``label``: that with the highest of ``probs``, which are in the order of the model's labels."""

    label: str
    probs: list[float]


@dataclass(slots=True)
class ScoringOutput:
    """The score of one pair; ``score`` is None if it failed, with the reason in ``error``."""

    score: float | None
    error: str | None = None


@dataclass(slots=True)
class RerankResult:
    """One document of a reranking. ``index``: its place in the documents given."""

    index: int
    relevance_score: float
    document: str


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
EncodeRequestOutput = PoolingRequestOutput[PoolingOutput]
