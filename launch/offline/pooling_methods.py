"""The methods of ``LLM`` for vectors and scores, over one method that computes the inputs of a call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.pooling.comparisons import Comparison, Scores, compare, compare_documents, ranking
from quire.frontend.text.pooling.inputs import PoolingInput, pooling_params, prompt_text, with_prompt
from quire.launch.offline.call_options import RequestOptions
from quire.launch.offline.pooled_input import Rows, RowsOutput
from quire.launch.offline.pooling_output import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EncodeRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringOutput,
)
from quire.launch.offline.prompt_input import PromptInput, is_single, plain_prompt
from quire.protocol.errors import EngineError, InvalidRequest, wrong_value
from quire.protocol.model.pooling_config import PoolingConfig, PoolingTask
from quire.protocol.request.pooling_params import PoolingParams


class PoolingOptions(RequestOptions, total=False):
    """Options of all methods.

    Attributes:
        truncate_prompt_tokens: tokens to which a longer text is cut; -1: the longest prompt of the model. Without it, a
            longer text is refused.
        truncation_side: the end that is cut off, left or right; by default the tokenizer's.
        add_special_tokens: let the tokenizer add its own special tokens to text (true).
        skip_reading_prefix_cache: compute the whole prompts, also what is cached of them (false).
        use_tqdm: show the progress (false).
    """

    truncate_prompt_tokens: int
    truncation_side: str
    add_special_tokens: bool
    skip_reading_prefix_cache: bool
    use_tqdm: bool


Prompts = PromptInput | Sequence[PromptInput]


class PoolingMethods(ABC):
    """The methods of ``LLM`` for vectors and scores: turn arguments into inputs, and their rows into outputs."""

    @property
    @abstractmethod
    def _capabilities(self) -> Capabilities:
        """What the model can do."""

    @abstractmethod
    def _compute(
        self,
        inputs: Sequence[PoolingInput],
        field_of: Callable[[int], str],
        params: PoolingParams,
        options: PoolingOptions,
    ) -> list[RowsOutput]:
        """Return the rows of each input. ``field_of``: names an input for errors."""

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt. ``options``: as of PoolingOptions, for all of these methods.

        Args:
            prompts: as of ``generate``.
            dimensions: entries of a vector that are kept, the first ones; None: all.
            normalize: make the vectors 1 long, if the model does.
            prompt_name: the model's prompt that is put before each text; None: the model's default.

        Raises:
            InvalidRequest: the model makes no vectors, or a prompt or an option is refused; the call is aborted.
            EngineError: the engine has failed.
        """
        pooling = self._capabilities.require_task("LLM.embed", "embed")
        params = pooling_params(pooling, "embed", dimensions, use_activation=normalize)
        found = self._of_prompts(pooling, prompts, prompt_name, params, options)
        return [_replaced(each, lambda rows: EmbeddingOutput(rows[0])) for each in found]

    def encode(
        self,
        prompts: Prompts,
        task: PoolingTask = "token_embed",
        *,
        prompt_name: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[EncodeRequestOutput]:
        """Return what any task of the model makes of each prompt: by default a vector for each token."""
        pooling = self._capabilities.require_pooling("LLM.encode")
        if task not in pooling.tasks:
            raise wrong_value("task", f"a task of this model ({', '.join(pooling.tasks)})", task, "unsupported_value")
        found = self._of_prompts(pooling, prompts, prompt_name, pooling_params(pooling, task), options)
        return [_replaced(each, PoolingOutput) for each in found]

    def classify(
        self, prompts: Prompts, *, use_activation: bool = True, **options: Unpack[PoolingOptions]
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels for each prompt; without the activation, the head's values."""
        pooling = self._capabilities.require_task("LLM.classify", "classify")
        params = pooling_params(pooling, "classify", use_activation=use_activation)

        def output(rows: Rows) -> ClassificationOutput:
            return ClassificationOutput(pooling.labels[int(rows[0].argmax())], rows[0].tolist())

        return [_replaced(each, output) for each in self._of_prompts(pooling, prompts, None, params, options)]

    def score(
        self,
        text_1: str | list[str],
        text_2: str | list[str],
        *,
        instruction: str = "",
        use_activation: bool = True,
        **options: Unpack[PoolingOptions],
    ) -> list[ScoringOutput]:
        """Return the scores of one text with one or more others, or of each text with its counterpart.

        ``instruction``: for rerankers with a template for it (Qwen3-Reranker); "": the model's own.
        """
        task = self._capabilities.require_scoring("LLM.score")
        pooling = self._capabilities.require_pooling("LLM.score")
        first, second = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
        if not first or not second:
            name = "text_2" if first else "text_1"
            raise InvalidRequest(f"{name} must not be empty", name)
        found = compare(pooling, task, first, second, instruction, is_list=not isinstance(text_2, str))
        scores = self._scores(pooling, found, options, use_activation=use_activation)
        return [ScoringOutput(None, each) if isinstance(each, str) else ScoringOutput(each) for each in scores]

    def rerank(
        self,
        query: str,
        documents: list[str],
        top_n: int = 0,
        *,
        instruction: str = "",
        use_activation: bool = True,
        **options: Unpack[PoolingOptions],
    ) -> list[RerankResult]:
        """Return the ``top_n`` best documents for the query, the best first; 0: all. Otherwise as ``score``."""
        task = self._capabilities.require_scoring("LLM.rerank")
        pooling = self._capabilities.require_pooling("LLM.rerank")
        if not documents:
            raise InvalidRequest("documents must not be empty", "documents")
        found = compare_documents(pooling, task, query, documents, instruction)
        scores: list[tuple[float, int]] = []
        for index, score in enumerate(self._scores(pooling, found, options, use_activation=use_activation)):
            if isinstance(score, str):
                raise EngineError(f"documents[{index}]: {score}")
            scores.append((score, index))
        return [RerankResult(index, score, documents[index]) for score, index in ranking(scores, top_n)]

    def _of_prompts(
        self,
        pooling: PoolingConfig,
        prompts: Prompts,
        prompt_name: str | None,
        params: PoolingParams,
        options: PoolingOptions,
    ) -> list[RowsOutput]:
        many: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        prefix = prompt_text(pooling, prompt_name)
        given = (plain_prompt(each) for each in many)
        inputs = [with_prompt(pooling, prefix, each) if isinstance(each, str) else each for each in given]
        return self._compute(inputs, lambda i: f"prompts[{i}]", params, options)

    def _scores(
        self, pooling: PoolingConfig, comparison: Comparison, options: PoolingOptions, *, use_activation: bool
    ) -> list[float | str]:
        """Return the score of each pair, or the reason why it has none."""
        params = pooling_params(pooling, comparison.task, use_activation=use_activation)
        scores: Scores[str] = Scores(comparison)
        outputs = self._compute(comparison.inputs, comparison.field_of, params, options)
        rows = (each.error or "failed" if each.outputs is None else each.outputs for each in outputs)
        found = (scores.push(index, each) for index, each in enumerate(rows))
        return [each for each in found if each is not None]


def _replaced(given: RowsOutput, output: Callable[[Rows], Any]) -> PoolingRequestOutput[Any]:
    """Return the result of a prompt with its rows in another form."""
    return PoolingRequestOutput(
        given.request_id,
        given.prompt,
        given.prompt_token_ids,
        None if given.outputs is None else output(given.outputs),
        given.num_cached_tokens,
        given.error,
    )
