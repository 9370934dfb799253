"""Vectors and scores from Python: arguments and outputs, over made-up rows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pooled_vectors import BOTH, CLASSIFIER, RERANKER, embedding_of, rows_of

from quire.frontend.text.pooling.capabilities import METHODS, Capabilities
from quire.frontend.text.pooling.inputs import PoolingInput
from quire.frontend.text.pooling.pairs import TextPair
from quire.launch.offline.pooled_input import RowsOutput
from quire.launch.offline.pooling_methods import PoolingMethods, PoolingOptions
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams


class Made(PoolingMethods):
    """Computes inputs of which each character is a token; those with "!" fail."""

    _capabilities = None  # type: ignore[assignment]

    def __init__(self, pooling: PoolingConfig | None) -> None:
        self._capabilities = Capabilities(True, pooling, METHODS)
        self.params: list[PoolingParams] = []
        self.fields: list[str] = []

    def _compute(
        self,
        inputs: Sequence[PoolingInput],
        field_of: Callable[[int], str],
        params: PoolingParams,
        options: PoolingOptions,
    ) -> list[RowsOutput]:
        self.params.append(params)
        self.fields = [field_of(index) for index in range(len(inputs))]
        return [self._output(each, params) for each in inputs]

    def _output(self, given: PoolingInput, params: PoolingParams) -> RowsOutput:
        text = given.first + given.second if isinstance(given, TextPair) else given
        ids = [ord(char) for char in text] if isinstance(text, str) else list(text)  # type: ignore[arg-type]
        if ord("!") in ids:
            return RowsOutput("x", None, ids, error="numerical_error: no")
        return RowsOutput("x", text if isinstance(text, str) else None, ids, rows_of(ids, params, 3))


def vector(text: str) -> Any:
    return embedding_of([ord(char) for char in text])


def test_embed() -> None:
    made = Made(BOTH)
    found = made.embed(["ab", {"prompt_token_ids": [5, 6]}, "c!"], dimensions=4, normalize=False)
    assert made.params == [PoolingParams("embed", 4, False)]
    assert made.fields == ["prompts[0]", "prompts[1]", "prompts[2]"]
    first, second, failed = found
    assert first.outputs is not None and first.outputs.embedding.shape == (4,)
    assert (first.prompt, second.prompt, second.prompt_token_ids) == ("ab", None, [5, 6])
    assert (failed.outputs, failed.error) == (None, "numerical_error: no")


@pytest.mark.parametrize("prompts", ["ab", [97, 98], np.array([97, 98]), {"prompt": "ab"}])
def test_one_prompt(prompts: Any) -> None:
    (found,) = Made(BOTH).embed(prompts)
    assert found.outputs is not None
    assert found.outputs.embedding.tolist() == vector("ab").tolist()


def test_encode() -> None:
    (found,) = Made(BOTH).encode("abc")
    assert found.outputs is not None and found.outputs.data.shape == (3, 8)
    with pytest.raises(InvalidRequest, match=r"task must be a task of this model \(embed, token_embed\)"):
        Made(BOTH).encode("abc", "classify")


def test_classify() -> None:
    (found,) = Made(CLASSIFIER).classify("abc")
    assert found.outputs is not None
    assert found.outputs.label == CLASSIFIER.labels[int(np.argmax(found.outputs.probs))]


def test_score() -> None:
    for first, second, pairs in (
        ("a", "b", ["ab"]),
        ("a", ["b", "c"], ["ab", "ac"]),
        (["a", "b"], ["c", "d"], ["ac", "bd"]),
    ):
        found = Made(BOTH).score(first, second)
        wanted = [float(vector(pair[0]) @ vector(pair[1])) for pair in pairs]
        assert [each.score for each in found] == pytest.approx(wanted, abs=1e-6)
    found = Made(RERANKER).score("a", ["b", "!"])
    assert [each.error for each in found] == [None, "numerical_error: no"]
    refused: Any = (
        ([], ["a"], "text_1 must not be empty"),
        ("a", [], "text_2 must not be empty"),
        (["a", "b"], ["c"], r"as many as text_2 \(got 2 and 1\)"),
    )
    for first, second, message in refused:
        with pytest.raises(InvalidRequest, match=message):
            Made(BOTH).score(first, second)


@pytest.mark.parametrize("pooling", [BOTH, RERANKER])
def test_rerank(pooling: PoolingConfig) -> None:
    documents = ["b", "a", "cd"]
    found = Made(pooling).rerank("a", documents, 2)
    assert len(found) == 2 and found[0].relevance_score >= found[1].relevance_score
    assert all(each.document == documents[each.index] for each in found)
    if pooling is BOTH:
        assert (found[0].index, found[0].relevance_score) == (1, pytest.approx(1.0))
    with pytest.raises(EngineError, match=r"documents\[1\]: numerical_error"):
        Made(pooling).rerank("a", ["b", "!"])
    with pytest.raises(InvalidRequest, match="documents must not be empty"):
        Made(pooling).rerank("a", [])


def test_wrong_model() -> None:
    with pytest.raises(InvalidRequest, match=r"LLM.embed needs a model that makes vectors: .* \(LLM.generate\)"):
        Made(None).embed("a")
    with pytest.raises(InvalidRequest, match=r"LLM.classify needs a model that has a classification head: this model"):
        Made(BOTH).classify("a")
