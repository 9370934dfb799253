"""The calls of one ``LLM``, which run one after the other."""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any

import msgspec
from tqdm import tqdm

from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.engine.job import Job
from quire.frontend.text.parsing.choose_format import AnswerFormat, choose_format
from quire.frontend.text.pooling.capabilities import METHODS, Capabilities
from quire.frontend.text.pooling.inputs import InputEncoder, PoolingInput
from quire.frontend.text.prompts import Prompt, check_params, encode_prompt, tokenize_bad_words
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import TokenTexts
from quire.launch.offline.batch import Batch, BatchRequest
from quire.launch.offline.blocking_client import BlockingClient
from quire.launch.offline.lora_request import LoRARequest, adapters_for
from quire.launch.offline.pooled_batch import PooledBatch, PooledInputs, RowsOutput
from quire.launch.offline.pooling_calls import PoolingOptions
from quire.launch.offline.prompt_input import PromptInput, plain_prompt, priorities_for
from quire.launch.offline.request_output import RequestOutput
from quire.launch.offline.running import Reading, RunningRequest
from quire.launch.offline.running import begin as begin_running
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, InvalidRequest
from quire.protocol.request import plugins
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import Control, Statistics

LoRAInput = LoRARequest | ListLike[LoRARequest | None] | None
OnText = Callable[[int, str], None]


class OfflineCalls:
    """Checks the arguments of calls, numbers their requests, and runs them with the one client of the engine.

    Attributes:
        client: set when the engine is ready.
        adapters: reads adapters; None if the engine has none.
        capabilities: what the model can do.
    """

    client: BlockingClient

    def __init__(self, config: EngineConfig, text_in: TextIn) -> None:
        self.adapters = AdapterReader(config.model, config.max_lora_rank) if config.enable_lora else None
        self.capabilities = Capabilities(config.model.generates, config.model.pooling, METHODS)
        self._defaults: dict[str, Any] = dict(config.sampling_defaults)
        self._markers = config.thinking_start_token_ids, config.thinking_end_token_ids
        self._text_in = text_in
        self._token_texts = TokenTexts(text_in.tokenizer)
        self._processors = plugins.load_logits_processors(config.logits_processors, config.logits_processors_exclude)
        self._num_requests = 0
        self._session_numbers = count(1)

    def new_session_name(self) -> str:
        return f"session-{next(self._session_numbers)}"

    def default_params(self) -> SamplingParams:
        """Return the engine's sampling parameters with those that ``generation_config`` changes."""
        return SamplingParams(**self._defaults)

    def ask(self, control: Control) -> Statistics:
        with self.client.turn():
            return self.client.ask(control)

    def begin(self, prompt: Prompt, params: SamplingParams, priority: int, seed: int, **more: Any) -> RunningRequest:
        self.capabilities.require_generation("LLM.start")
        with self.client.turn():
            reading = Reading(self.client, self._text_in, self._token_texts, self)
            self._num_requests += 1
            return begin_running(reading, f"offline-{self._num_requests}", prompt, params, priority, seed, **more)

    def encode(self, prompt: PromptInput, *, add_special_tokens: bool = True) -> Prompt:
        return encode_prompt(plain_prompt(prompt), self._text_in, self.client, add_special_tokens=add_special_tokens)

    def params_for(
        self, given: SamplingParams | ListLike[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        one = self.default_params() if given is None else given
        params = [one] * num_prompts if isinstance(one, SamplingParams) else list(one)
        if len(params) != num_prompts:
            raise InvalidRequest(f"{len(params)} sampling_params for {num_prompts} prompts", "sampling_params")
        for each in params:
            check_params(each, self.client)
            plugins.check_params(self._processors, each)
        return [tokenize_bad_words(each, self._text_in, self.client) for each in params]

    def run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None,
        priority: int | ListLike[int] | None,
        use_tqdm: bool,
        on_text: OnText | None,
        lora_request: LoRAInput,
        jobs: list[Job],
    ) -> list[RequestOutput]:
        self.capabilities.require_generation("LLM.generate")
        each_params = self.params_for(params, len(prompts))
        if any(each.stop for each in each_params):
            prompts = [self._with_thoughts(prompt) for prompt in prompts]
        each_priority = priorities_for(priority, len(prompts))
        each_adapter = adapters_for(lora_request, len(prompts), self.adapters)
        with self.client.turn():
            first = self._num_requests + 1
            self._num_requests += len(prompts)
            requests = [
                BatchRequest(f"offline-{first + i}", *each)
                for i, each in enumerate(zip(prompts, each_params, each_priority, each_adapter, jobs, strict=True))
            ]
            batch = Batch(self.client, self._text_in, self._token_texts, requests, on_text)
            try:
                with tqdm(total=len(prompts), desc="Requests", disable=not use_tqdm) as bar:
                    batch.finish(bar)
            except BaseException:
                batch.abort()
                raise
            return batch.outputs

    def pool(
        self,
        inputs: ListLike[PoolingInput],
        field_of: Callable[[int], str],
        params: PoolingParams,
        options: PoolingOptions,
    ) -> list[RowsOutput]:
        """Compute the inputs of one call for vectors or scores."""
        encoder = self._input_encoder
        truncation = encoder.truncation(options.get("truncate_prompt_tokens"), options.get("truncation_side"))
        special, count = options.get("add_special_tokens", True), len(inputs)
        adapters = adapters_for(options.get("lora_request"), count, self.adapters)
        priorities = priorities_for(options.get("priority"), count)
        skips = options.get("skip_reading_prefix_cache", False)
        params = msgspec.structs.replace(params, skip_reading_prefix_cache=skips)

        def encode(index: int) -> Prompt:
            return encoder.encode(inputs[index], truncation, field_of(index), add_special_tokens=special)

        with self.client.turn():
            pooled = PooledInputs(self._num_requests + 1, encode, params, priorities, adapters)
            self._num_requests += count
            batch = PooledBatch(self.client, pooled)
            try:
                with tqdm(total=count, desc="Requests", disable=not options.get("use_tqdm")) as bar:
                    return batch.finish(bar)
            except BaseException:
                batch.abort()
                raise

    def _with_thoughts(self, prompt: Prompt) -> Prompt:
        """Return the prompt, if it is a conversation, with what finds the thoughts of its answer."""
        form = self._answers if prompt.end else None
        return prompt if form is None else replace(prompt, thoughts=form.thoughts(prompt.end, with_tools=True))

    @cached_property
    def _answers(self) -> AnswerFormat | None:
        """The format of answers to conversations; None if its delimiters are not in their text, or it is not known."""
        start, end = (self._text_in.decode(ids, skip_special_tokens=False) for ids in self._markers)
        template = self._text_in.template
        try:
            form = choose_format(
                self._text_in.special_tokens,
                "" if template is None else template.source,
                self._text_in.response_template,
                markers=(start, end) if start and end else None,
            )
        except ConfigError:
            return None
        return None if form is None or form.special_ids else form

    @cached_property
    def _input_encoder(self) -> InputEncoder:
        return InputEncoder(self._text_in, self.client, self.capabilities.require_pooling("LLM"))
