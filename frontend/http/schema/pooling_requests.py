"""Parsed requests for vectors and scores: their inputs, and the fields checked against the model and each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from quire.frontend.engine.terms import Terms
from quire.frontend.http.schema.pooling_bodies import (
    ClassificationBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import Parser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.text.pooling.comparisons import Comparison, compare, compare_documents
from quire.frontend.text.pooling.inputs import (
    InputEncoder,
    PoolingConversation,
    PoolingInput,
    Truncation,
    pooling_params,
    prompt_text,
    with_prompt,
)
from quire.frontend.text.prompts import split_prompts
from quire.protocol.errors import InvalidRequest, wrong_value
from quire.protocol.request.pooling_params import PoolingParams, PoolingTask

B = TypeVar("B", bound=PoolingBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRequest:
    """A parsed request of any of the routes.

    Attributes:
        inputs: what is turned into a vector or a score each, in this order.
        field_of: returns the field of an input, for errors.
        ignored: names of unknown fields that the client sent.
    """

    model: str
    inputs: Sequence[PoolingInput]
    field_of: Callable[[int], str]
    params: PoolingParams
    truncation: Truncation
    add_special_tokens: bool
    terms: Terms
    ignored: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParser:
    """Parses JSON objects to requests, for one model. All methods raise InvalidRequest.

    Attributes:
        parser: knows the served names, and reads conversations.
        encoder: of the model.
    """

    parser: Parser
    encoder: InputEncoder

    def embedding(self, raw: Mapping[str, Any], task: PoolingTask | None) -> tuple[PooledRequest, EmbeddingBody]:
        """Parse a body of /v1/embeddings, or (``task`` None) of /pooling, whose field names the task."""
        body, ignored = self._read(EmbeddingBody, raw)
        if body.normalize is not None and body.use_activation not in (None, body.normalize):
            raise InvalidRequest("normalize and use_activation must be equal if both are given", "normalize")
        if task is None:
            tasks = self.encoder.pooling.tasks
            task = body.task or tasks[0]
            if task not in tasks:
                raise wrong_value("task", f"a task of this model ({', '.join(tasks)})", task, "unsupported_value")
        elif body.task not in (None, task):
            raise InvalidRequest(f"task must be {task} on this route (got {body.task})", "task", "unsupported_value")
        active = body.normalize if body.use_activation is None else body.use_activation
        params = pooling_params(
            self.encoder.pooling, task, body.dimensions, use_activation=True if active is None else active
        )
        return self._of_inputs(body, params, ignored), body

    def classification(self, raw: Mapping[str, Any]) -> PooledRequest:
        body, ignored = self._read(ClassificationBody, raw)
        return self._of_inputs(body, self._params(body, "classify"), ignored)

    def score(self, raw: Mapping[str, Any], task: PoolingTask) -> tuple[PooledRequest, Comparison]:
        body, ignored = self._read(ScoreBody, raw)
        first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        is_list = isinstance(body.text_2, list)
        found = compare(self.encoder.pooling, task, first, second, body.instruction, is_list=is_list)
        return self._request(body, found.inputs, found.field_of, task, ignored), found

    def rerank(
        self, raw: Mapping[str, Any], task: PoolingTask
    ) -> tuple[PooledRequest, Comparison, RerankBody, list[str]]:
        """Parse a body of /rerank, and return its documents too."""
        body, ignored = self._read(RerankBody, raw)
        documents = _documents(body.documents)
        found = compare_documents(self.encoder.pooling, task, body.query, documents, body.instruction)
        return self._request(body, found.inputs, found.field_of, task, ignored), found, body, documents

    def _read(self, kind: type[B], raw: Mapping[str, Any]) -> tuple[B, Ignored]:
        ignored = Ignored(self.parser.unknown_fields)
        return read(kind, raw, ignored=ignored), ignored

    def _params(self, body: PoolingBody, task: PoolingTask) -> PoolingParams:
        return pooling_params(self.encoder.pooling, task, use_activation=body.use_activation is not False)

    def _of_inputs(self, body: ClassificationBody, params: PoolingParams, ignored: Ignored) -> PooledRequest:
        """Return the request of a body with ``input`` or ``messages``."""
        if body.messages is not None:
            if body.input is not None:
                raise InvalidRequest("input and messages cannot be combined", "messages")
            conversation: PoolingInput = PoolingConversation(*self.parser.conversation(body))
            return self._request(body, [conversation], lambda i: "messages", params.task, ignored, params)
        if body.input is None:
            raise InvalidRequest("input is required", "input", "missing_required_parameter")
        given = split_prompts(body.input, "input", None)
        prefix = prompt_text(self.encoder.pooling, body.prompt_name)
        pooling = self.encoder.pooling
        inputs = [with_prompt(pooling, prefix, each) if isinstance(each, str) else each for each in given]
        is_list = isinstance(body.input, list) and isinstance(body.input[0], str | list)
        return self._request(
            body, inputs, lambda i: f"input[{i}]" if is_list else "input", params.task, ignored, params
        )

    def _request(
        self,
        body: PoolingBody,
        inputs: Sequence[PoolingInput],
        field_of: Callable[[int], str],
        task: PoolingTask,
        ignored: Ignored,
        params: PoolingParams | None = None,
    ) -> PooledRequest:
        return PooledRequest(
            model=self.parser.model(body.model),
            inputs=inputs,
            field_of=field_of,
            params=replace(
                params or self._params(body, task), skip_reading_prefix_cache=body.skip_reading_prefix_cache
            ),
            truncation=self.encoder.truncation(body.truncate_prompt_tokens, body.truncation_side),
            add_special_tokens=body.add_special_tokens,
            terms=Terms(body.priority, body.cache_salt),
            ignored=ignored.names,
        )


def _texts(value: Any, param: str) -> list[str]:
    """Return the texts of a field: one, or a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong_value(param, "a string or a list of strings", value)
    if not texts:
        raise InvalidRequest(f"{param} must not be empty", param)
    return texts


def _documents(value: Any) -> list[str]:
    """Return the texts of documents, each given as a string or as an object with ``text``."""
    if not isinstance(value, list):
        raise wrong_value("documents", "a list of strings or of objects with text", value)
    if not value:
        raise InvalidRequest("documents must not be empty", "documents")
    texts = []
    for index, each in enumerate(value):
        text = each.get("text") if isinstance(each, dict) else each
        if not isinstance(text, str):
            raise wrong_value(f"documents[{index}]", "a string or an object with text", each)
        texts.append(text)
    return texts
