"""The calls of one ``LLM``, which run one after the other."""

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, pairwise
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.engine.job import Job
from quire.frontend.images.given_rows import RowsReader
from quire.frontend.images.reader import ImageReader
from quire.frontend.text.chat_template import Message
from quire.frontend.text.decisions.asking import Asker
from quire.frontend.text.decisions.questions import Answer, read_questions
from quire.frontend.text.image_parts import MessageImages
from quire.frontend.text.message_checks import check_messages
from quire.frontend.text.parsing.choose_format import AnswerFormat, choose_format
from quire.frontend.text.pooling.capabilities import METHODS, Capabilities
from quire.frontend.text.pooling.inputs import InputEncoder, PoolingInput
from quire.frontend.text.prompts import (
    Prompt,
    check_params,
    encode_prompt,
    fit_params,
    prompt_of_rows,
    tokenize_bad_words,
)
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.frontend.text.text_out import TokenTexts
from quire.launch.offline.batch import Batch, BatchPart
from quire.launch.offline.blocking_client import BlockingClient
from quire.launch.offline.call_options import CallOptions, RequestOptions, check_known, one_each, terms_for
from quire.launch.offline.deciding import ReadPart
from quire.launch.offline.pooled_input import PooledInput, RowsOutput
from quire.launch.offline.pooling_methods import PoolingOptions
from quire.launch.offline.prompt_input import PromptInput, given_rows, plain_prompt
from quire.launch.offline.reading import Reading
from quire.launch.offline.request_output import RequestOutput
from quire.launch.offline.running import RunningRequest, check_startable, num_shared
from quire.launch.offline.samples import PromptSamples
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, InvalidRequest
from quire.protocol.request import plugins
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import Control, Statistics


class OfflineCalls:
    """Checks the arguments of calls, numbers their requests, and runs them with the one client of the engine.

    Attributes:
        client: set when the engine is ready.
        capabilities: what the model can do.
        images: reads the images of messages; None: the model reads none.
        rows: reads prompts given as embeddings; None: they are refused.
    """

    client: BlockingClient
    images: ImageReader | None = None
    rows: RowsReader | None = None

    def __init__(self, config: EngineConfig, text_in: TextIn) -> None:
        self._adapters = AdapterReader(config.model, config.max_lora_rank) if config.enable_lora else None
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

    def begin(self, prompt: Prompt, params: SamplingParams, seed: int, options: RequestOptions) -> RunningRequest:
        """Begin one answer; raise InvalidRequest as ``LLM.start``."""
        check_known("LLM.start()", options, RequestOptions)
        self.capabilities.require_generation("LLM.start")
        check_startable(params)
        (terms,) = terms_for(options, 1, self._adapters)
        with self._names(1) as (name,):
            request = terms.request(name, prompt, fit_params(params, prompt, self.client, clamp=True), seed)
            return RunningRequest(self._reading, self.client.submit(request, lambda: None), prompt, params, self)

    def fork(self, parent: RunningRequest, num_tokens: int | None, params: SamplingParams, seed: int) -> RunningRequest:
        """Begin one answer that continues ``num_tokens`` of another's, or all that have been read."""
        shared = num_shared(parent, num_tokens, params)
        check_startable(params)
        if parent.engine is not self.client:  # ids of another engine mean other requests here
            raise InvalidRequest(f"request {parent.request_id} belongs to another LLM", "request")
        root = parent.stream
        with self._names(1) as (name,):
            request = msgspec.structs.replace(
                root.request,
                request_id=name,
                sampling=fit_params(params, parent.prompt, self.client, clamp=True),
                seed=seed,
                output_token_ids=np.array(root.tokens[:shared], np.int32) if shared else None,
                arrival=time.monotonic(),
            )
            stream = self.client.submit(request, lambda: None, root)
            return RunningRequest(self._reading, stream, parent.prompt, params, self, parent)

    @contextmanager
    def _names(self, num_requests: int) -> Iterator[list[str]]:
        """Have the client's turn, with an id for each request."""
        with self.client.turn():
            first = self._num_requests + 1
            self._num_requests += num_requests
            yield [f"offline-{number}" for number in range(first, first + num_requests)]

    def encode(self, prompt: PromptInput, *, add_special_tokens: bool = True) -> Prompt:
        if (rows := given_rows(prompt)) is not None:
            if self.rows is None:
                text = "prompt_embeds are not supported: create the LLM with enable_prompt_embeds=True"
                raise InvalidRequest(text, "prompt_embeds", "unsupported")
            return prompt_of_rows(self.rows.read("prompt_embeds", rows), self.client)
        return encode_prompt(plain_prompt(prompt), self._text_in, self.client, add_special_tokens=add_special_tokens)

    def conversation(self, given: Any, options: ChatOptions) -> tuple[list[Message], ChatOptions]:
        """Return the checked messages, and the options with their images, which are read.

        Raises:
            InvalidRequest: as ``check_messages`` and ``ImageReader.read``.
        """
        images = MessageImages()
        messages = check_messages(given, images=None if self.images is None else images.sources)
        if self.images is not None:
            images.stored = self.images.read_now(images.sources)
        return messages, replace(options, images=images)

    def params_for(
        self, given: SamplingParams | ListLike[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        params = one_each(
            "sampling_params", self.default_params() if given is None else given, num_prompts, "sampling_params"
        )
        for each in params:
            check_params(each, self.client)
            plugins.check_params(self._processors, each)
        return [tokenize_bad_words(each, self._text_in, self.client) for each in params]

    def run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None,
        options: CallOptions,
        job: Job | None = None,
    ) -> list[RequestOutput]:
        """Answer the prompts of one call. ``job``: theirs, if no option gives it."""
        check_known("LLM.generate()", options, CallOptions)
        self.capabilities.require_generation("LLM.generate")
        each_params = self.params_for(params, len(prompts))
        if any(each.stop for each in each_params):
            prompts = [self._with_thoughts(prompt) for prompt in prompts]
        each_terms = terms_for(options, len(prompts), self._adapters)
        if job is not None:
            each_terms = [replace(terms, job=job) for terms in each_terms]
        on_text = options.get("on_text")
        with self._names(len(prompts)) as names:
            found: list[PromptSamples] = []
            for name, prompt, sampling, terms in zip(names, prompts, each_params, each_terms, strict=True):
                show = None if on_text is None else partial(on_text, len(found))
                found.append(PromptSamples(self._reading, name, terms, prompt, sampling, show))
            self._finish([sample for each in found for sample in each.samples], len(prompts), options)
        return [each.output for each in found]

    def pool(
        self,
        inputs: ListLike[PoolingInput],
        field_of: Callable[[int], str],
        params: PoolingParams,
        options: PoolingOptions,
    ) -> list[RowsOutput]:
        """Compute the inputs of one call for vectors or scores."""
        check_known("LLM", options, PoolingOptions)
        encoder, special = self._input_encoder, options.get("add_special_tokens", True)
        truncation = encoder.truncation(options.get("truncate_prompt_tokens"), options.get("truncation_side"))
        each_terms = terms_for(options, len(inputs), self._adapters)
        skips = options.get("skip_reading_prefix_cache", False)
        params = msgspec.structs.replace(params, skip_reading_prefix_cache=skips)

        def encode(index: int) -> Prompt:
            return encoder.encode(inputs[index], truncation, field_of(index), add_special_tokens=special)

        with self._names(len(inputs)) as names:
            parts = [
                PooledInput(self.client, name, terms, partial(encode, index), params)
                for index, (name, terms) in enumerate(zip(names, each_terms, strict=True))
            ]
            self._finish(parts, len(parts), options)
        return [part.output for part in parts]

    def decide(
        self, given: Any, questions: Any, variables: Mapping[str, Any] | None, options: RequestOptions
    ) -> list[Answer]:
        """Answer questions about one conversation; arguments as of ``LLM.decide``."""
        check_known("LLM.decide()", options, RequestOptions)
        self.capabilities.require_generation("LLM.decide")
        asked = read_questions(questions)
        messages, for_template = self.conversation(given, ChatOptions(variables=variables))
        made = Asker(messages, for_template, self._text_in, self.client, self._markers).ask(asked)
        (terms,) = terms_for(options, 1, self._adapters)
        for begin, end in pairwise([0, *made.ends]):
            with self._names(end - begin) as names:
                pairs = zip(names, made.reads[begin:end], strict=True)
                parts = [ReadPart(self.client, name, terms, read) for name, read in pairs]
                self._finish(parts, len(parts), {})
        return [each.answer() for each in made.asked]

    def _finish(self, parts: ListLike[BatchPart], num_prompts: int, options: Mapping[str, Any]) -> None:
        """Run the sequences of a call until all have ended, or none runs any more."""
        batch = Batch(self.client, parts)
        try:
            with tqdm(total=num_prompts, desc="Requests", disable=not options.get("use_tqdm")) as bar:
                batch.finish(bar.update)
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
    def _reading(self) -> Reading:
        return Reading(self.client, self._text_in, self._token_texts)

    @cached_property
    def _input_encoder(self) -> InputEncoder:
        return InputEncoder(self._text_in, self.client, self.capabilities.require_pooling("LLM"))
