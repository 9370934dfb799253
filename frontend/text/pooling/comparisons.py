"""Scores of pairs of texts, for /score and /rerank and their methods in Python."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from quire.frontend.text.pooling.inputs import PoolingInput, prompt_text, with_prompt
from quire.frontend.text.pooling.pairs import TextPair
from quire.protocol.errors import InvalidRequest
from quire.protocol.model.pooling_config import PoolingConfig, PoolingTask

E = TypeVar("E")
Rows = npt.NDArray[np.float32]

QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
"""Names of the prompts for queries and documents, as in sentence-transformers."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is computed for the scores of some pairs.

    With the task classify, each input is a pair. With embed, each is a text, and a score is the cosine of two vectors:
    of the first one and each other one (``is_one_to_many``), or of each one with an even index and its successor.
    ``field_of``: returns the field of an input, for errors.
    """

    task: PoolingTask
    inputs: Sequence[PoolingInput]
    field_of: Callable[[int], str]
    is_one_to_many: bool = True


def compare(
    pooling: PoolingConfig, task: PoolingTask, first: list[str], second: list[str], instruction: str, *, is_list: bool
) -> Comparison:
    """Compare one text with others, or each with its counterpart. ``is_list``: the second field is a list.

    Raises:
        InvalidRequest: the numbers differ, or the model has no template with an instruction.
    """
    if len(first) not in (1, len(second)):
        text = "text_1 must be one text, or as many as text_2"
        raise InvalidRequest(f"{text} (got {len(first)} and {len(second)})", "text_1")
    _check_instruction(pooling, instruction)
    if task == "classify":
        pairs = _pairs(pooling, first * (len(second) // len(first)), second, instruction)
        return Comparison(task, pairs, lambda i: f"text_2[{i}]" if is_list else "text_2")
    prefix = prompt_text(pooling, None)
    if len(first) == 1:
        texts = [with_prompt(pooling, prefix, text) for text in (*first, *second)]
        return Comparison(task, texts, lambda i: "text_1" if not i else f"text_2[{i - 1}]" if is_list else "text_2")
    texts = [with_prompt(pooling, prefix, text) for pair in zip(first, second, strict=True) for text in pair]
    return Comparison(task, texts, lambda i: f"text_{i % 2 + 1}[{i // 2}]", is_one_to_many=False)


def compare_documents(
    pooling: PoolingConfig, task: PoolingTask, query: str, documents: list[str], instruction: str
) -> Comparison:
    """Compare a query with documents, with the model's prompts for both if it has such.

    Raises:
        InvalidRequest: the model has no template with an instruction.
    """
    _check_instruction(pooling, instruction)
    if task == "classify":
        pairs = _pairs(pooling, [query] * len(documents), documents, instruction)
        return Comparison(task, pairs, lambda i: f"documents[{i}]")
    before_query, before_document = (
        next((pooling.prompts[name] for name in names if name in pooling.prompts), prompt_text(pooling, None))
        for names in (QUERY_PROMPTS, DOCUMENT_PROMPTS)
    )
    texts = [with_prompt(pooling, before_query, query)]
    texts += [with_prompt(pooling, before_document, text) for text in documents]
    return Comparison(task, texts, lambda i: f"documents[{i - 1}]" if i else "query")


def _pairs(pooling: PoolingConfig, first: Sequence[str], second: Sequence[str], instruction: str) -> list[TextPair]:
    wanted = instruction or prompt_text(pooling, None)
    return [TextPair(one, other, wanted) for one, other in zip(first, second, strict=True)]


def _check_instruction(pooling: PoolingConfig, instruction: str) -> None:
    if instruction and not pooling.label_token_ids:
        text = "instruction needs a reranker with a template for it, such as Qwen3-Reranker: this model has none"
        raise InvalidRequest(text, "instruction", "unsupported_value")


class Scores(Generic[E]):
    """Turns the results of the inputs of a comparison, which arrive in order, into scores."""

    def __init__(self, comparison: Comparison) -> None:
        self._has_vectors = comparison.task == "embed"
        self._is_one_to_many = comparison.is_one_to_many
        self._first: Rows | E | None = None

    def push(self, index: int, outcome: Rows | E) -> float | E | None:
        """Return the score that this result completes, or None.

        ``outcome``: float32 ``[1, width]``, or the error of the input, which is that of its scores.
        """
        if not self._has_vectors:
            return float(outcome[0, 0]) if isinstance(outcome, np.ndarray) else outcome
        if self._first is None or not (self._is_one_to_many or index % 2):
            self._first = outcome
            return None
        first = self._first
        if not isinstance(first, np.ndarray):
            return first
        return cosine(first[0], outcome[0]) if isinstance(outcome, np.ndarray) else outcome


def cosine(first: Rows, second: Rows) -> float:
    """Return the cosine of two vectors ``[width]``; 0 if one of them is zero."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / lengths) if lengths else 0.0


def ranking(scores: Sequence[tuple[float, int]], top_n: int) -> list[tuple[float, int]]:
    """Return the best (score, index), the highest score first; ``top_n`` 0: all."""
    return sorted(scores, key=lambda each: (-each[0], each[1]))[: top_n or None]
