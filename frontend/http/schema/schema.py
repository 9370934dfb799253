"""Parsed requests: bodies are converted, and their fields checked against the model and each other.

To add a field: a line in ``bodies.py`` and, if the field has an effect, its step in Parser.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from quire.frontend.engine.job import NO_JOB
from quire.frontend.engine.terms import NO_TERMS, Terms
from quire.frontend.http.schema.bodies import (
    SAMPLING_FIELDS,
    ChatBody,
    CompletionBody,
    ForkBody,
    GenerationBody,
    SessionBody,
    StreamOptions,
    TokenizeBody,
)
from quire.frontend.http.schema.errors import shorten
from quire.frontend.http.schema.job_hints import job_of
from quire.frontend.http.schema.pooling_bodies import ClassificationBody
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.sampling_fields import ALIASES, constraint, has_alias, sampling_objects
from quire.frontend.http.schema.tools import ToolUse, answer_or_calls, parse_tools
from quire.frontend.http.schema.unknown_fields import Ignored, UnknownFields
from quire.frontend.images.given_rows import RowsReader
from quire.frontend.images.source import StoredItem
from quire.frontend.text.chat_template import Message
from quire.frontend.text.image_parts import MessageImages
from quire.frontend.text.message_checks import check_messages
from quire.frontend.text.parsing.writing import AnswerWriter
from quire.frontend.text.prompts import MAX_PROMPTS, ModelLimits, check_params, split_prompts, template_variables
from quire.frontend.text.text_in import ChatOptions
from quire.protocol.errors import InvalidRequest
from quire.protocol.request import plugins
from quire.protocol.request.logits_processors import LogitsProcessor
from quire.protocol.request.sampling_params import MAX_TOKENS_LIMIT, SamplingParams, check_int

DEFAULT_COMPLETION_TOKENS = 16
READ_ELSEWHERE = (*SAMPLING_FIELDS, *ALIASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonRequest:
    """A parsed request of either endpoint.

    Attributes:
        clamp_max_tokens: max_tokens is a default, to be reduced until it fits in the context.
        num_returned: choices of each prompt; if ``params.n`` are more, the best of these.
        prompt_only: leave out the output, because the client asked for max_tokens 0.
        prompt_logprobs: the value of the field of this name.
        session: the open session that it continues, or None.
        ignored: names of unknown fields that the client sent.
        returns_token_ids: return the ids of the tokens of prompt and output.
        terms: what else it says; the job is the one that the body names.
    """

    model: str
    params: SamplingParams
    clamp_max_tokens: bool
    num_returned: int
    stream: bool
    stream_options: StreamOptions
    prompt_logprobs: int | None
    prompt_only: bool = False
    session: SessionBody | None = None
    ignored: Sequence[str] = ()
    returns_token_ids: bool = False
    terms: Terms = NO_TERMS


GivenPrompt = str | list[int] | Callable[[], StoredItem]
"""Text, token ids, or what reads given embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(CommonRequest):
    """``echo``: start the text and its log probabilities with the prompt.

    ``add_special_tokens``: let the tokenizer add its own special tokens to a prompt that is text.
    ``hides_logprobs``: log probabilities serve only to find the best choices, and are left out of the response.
    """

    prompts: Sequence[GivenPrompt]
    echo: bool
    add_special_tokens: bool
    hides_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(CommonRequest):
    """A parsed request with messages.

    Attributes:
        tool_use: the required call, or None.
        parallel_calls: an answer may have more than one.
        has_only_calls: an answer with a call has no content besides.
    """

    messages: list[Message]
    options: ChatOptions
    tool_use: ToolUse | None
    parallel_calls: bool = True
    has_only_calls: bool = False


class OtherModels(Protocol):
    """What else than the served model a request may name as its model."""

    def may_have(self, name: str) -> bool:
        """Return False if nothing has this name. True: a look-up by name decides."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """Parser of JSON objects to requests, for one model with its served names. All methods raise InvalidRequest.

    ``ignored`` of a method gets the unknown fields; it has those that another API has read.

    Attributes:
        others: what else a request may name as its model.
        defaults: the model's sampling parameters, for fields that a request leaves out.
        writer: how the model writes calls, if that is known.
        reads_images: messages may have images.
        rows: reads prompts given as embeddings; None: they are refused.
    """

    served_names: Sequence[str]
    limits: ModelLimits
    others: OtherModels | None = None
    processors: Sequence[type[LogitsProcessor]] = ()
    defaults: Mapping[str, int | float] = field(default_factory=dict)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    writer: AnswerWriter | None = None
    reads_images: bool = False
    rows: RowsReader | None = None

    def completion(self, raw: Mapping[str, Any], ignored: Ignored | None = None) -> CompletionRequest:
        ignored = ignored or Ignored(self.unknown_fields)
        body = read(CompletionBody, raw, besides=READ_ELSEWHERE, ignored=ignored)
        least = 0 if body.echo or body.session is not None else 1
        max_tokens = self._max_tokens("max_tokens", body.max_tokens, minimum=least)
        # The engine always generates a token; for max_tokens 0 the response leaves it out.
        num_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(max_tokens, 1)
        echo_logprobs = body.logprobs if body.echo else None
        params = self._params(body, raw, ignored, num_tokens, body.logprobs, echo_logprobs=echo_logprobs)
        num_returned, hides_logprobs = params.num_outputs, params.logprobs is None
        if body.best_of is not None and body.best_of != params.n:
            params = ranked(params, body.best_of, stream=body.stream)
        return CompletionRequest(
            **self._common(body, params, max_tokens, raw, ignored, num_returned),
            prompts=self._prompts(body),
            echo=body.echo,
            add_special_tokens=body.add_special_tokens,
            hides_logprobs=hides_logprobs,
        )

    def _prompts(self, body: CompletionBody) -> Sequence[GivenPrompt]:
        name, value = "prompt_embeds", body.prompt_embeds
        if value is None:
            if body.prompt is None:
                raise InvalidRequest("prompt is required", "prompt", "missing_required_parameter")
            return split_prompts(body.prompt) if body.session is None else [_one_prompt(body.prompt)]
        if self.rows is None:
            text = f"{name} is not supported: the server must be started with --enable-prompt-embeds"
            raise InvalidRequest(text, name, "unsupported")
        for other in ("prompt", "session", "echo"):  # nothing has the text of embeddings
            if getattr(body, other):
                raise InvalidRequest(f"{name} cannot be combined with {other}", name, "unsupported_value")
        if not isinstance(value, list):
            return [partial(self.rows.read, name, value)]
        if not 1 <= len(value) <= MAX_PROMPTS:
            raise InvalidRequest(f"{name} must hold 1 to {MAX_PROMPTS} prompts (got {len(value)})", name)
        return [partial(self.rows.read, f"{name}[{i}]", each) for i, each in enumerate(value)]

    def chat(self, raw: Mapping[str, Any], ignored: Ignored | None = None) -> ChatRequest:
        ignored = ignored or Ignored(self.unknown_fields)
        body = read(ChatBody, raw, besides=READ_ELSEWHERE, ignored=ignored)
        least = 0 if body.session is not None else 1
        newer = self._max_tokens("max_completion_tokens", body.max_completion_tokens, minimum=least)
        older = self._max_tokens("max_tokens", body.max_tokens, minimum=least)
        max_tokens = older if newer is None else newer
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        parallel = body.parallel_tool_calls
        tools, tool_use = parse_tools(body.tools, body.tool_choice, parallel=parallel, ignored=ignored)
        logprobs = body.top_logprobs if body.logprobs else None
        wanted = self.defaults.get("max_tokens") if max_tokens is None else max(max_tokens, 1)
        params = self._params(body, raw, ignored, wanted, logprobs, tool_use=tool_use)
        is_raw = body.structured_outputs is not None or any(has_alias(raw, name) for name in ALIASES)
        is_raw = is_raw or body.continue_final_message
        content = None if tool_use or is_raw else params.structured_outputs
        form = answer_or_calls(self.writer, content, tools or [], parallel=parallel)
        if form is not None:
            params = msgspec.structs.replace(params, structured_outputs=form)
        messages, options = self.conversation(body, ignored)
        if body.session is not None:
            if body.add_generation_prompt is not None or body.continue_final_message:
                name = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
                raise InvalidRequest(f"{name} cannot be combined with session", name, "unsupported_value")
            options = replace(options, add_generation_prompt=max_tokens != 0)
        return ChatRequest(
            **self._common(body, params, max_tokens, raw, ignored, params.num_outputs),
            messages=messages,
            options=replace(options, tools=tools),
            tool_use=tool_use,
            parallel_calls=parallel,
            has_only_calls=form is not None,
        )

    def conversation(
        self, body: ChatBody | TokenizeBody | ClassificationBody, ignored: Ignored | None = None
    ) -> tuple[list[Message], ChatOptions]:
        """Return the messages and the template options to render them with.

        ``ignored``: gets what has no effect in images; None: the route reads none.
        """
        images = MessageImages()
        reads_images = self.reads_images and ignored is not None
        messages = check_messages(body.messages, images=images.sources if reads_images else None)
        if ignored is not None and any(source.detail != "auto" for source in images.sources):
            ignored.note("detail", ())
        continues = body.continue_final_message
        opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        if continues and opens:
            name = "continue_final_message"
            raise InvalidRequest(f"{name} and add_generation_prompt cannot both be true", name)
        variables = template_variables(body.reasoning_effort, body.chat_template_kwargs)
        return messages, ChatOptions(opens, continues, variables, images=images)

    def fork(self, raw: Mapping[str, Any]) -> ForkBody:
        body = read(ForkBody, raw)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        read(StreamOptions, body.stream_options or {}, "stream_options")
        given = {name: getattr(body, name) for name in ("n", "seed", "temperature", "max_tokens")}
        SamplingParams(**{name: value for name, value in given.items() if value is not None})
        return body

    def model(self, name: str | None) -> str:
        """Return the requested name of a model, by default the first served name."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names and not (self.others is not None and self.others.may_have(name)):
            raise InvalidRequest(f"the model {shorten(name)} does not exist", "model", "model_not_found")
        return name

    def _max_tokens(self, name: str, value: Any, *, minimum: int = 1) -> int | None:
        if value is None:
            return None
        try:
            return check_int(name, value, minimum, min(self.limits.max_model_len, MAX_TOKENS_LIMIT))
        except InvalidRequest as error:
            context = f"{error.message}: this model's maximum context length is {self.limits.max_model_len}"
            raise InvalidRequest(context, name, error.code) from None

    def _params(
        self,
        body: GenerationBody,
        raw: Mapping[str, Any],
        ignored: Ignored,
        max_tokens: Any,
        logprobs: Any,
        *,
        echo_logprobs: Any = None,
        tool_use: ToolUse | None = None,
    ) -> SamplingParams:
        """``echo_logprobs``: number of log probabilities per token of an echoed prompt, or None."""
        searches = bool(raw.get("use_beam_search"))  # it does not sample: the model's defaults are of no use
        defaults = {} if searches else self.defaults
        given: dict[str, Any] = {name: value for name, value in defaults.items() if name in SAMPLING_FIELDS}
        given |= {name: raw[name] for name in SAMPLING_FIELDS if raw.get(name) is not None}
        given |= sampling_objects(body, self.limits.vocab_size, ignored)
        if "prompt_logprobs" in given and body.stream:
            raise InvalidRequest("prompt_logprobs require stream to be false", "prompt_logprobs", "unsupported_value")
        if searches and body.stream:
            raise InvalidRequest("use_beam_search requires stream to be false", "use_beam_search", "unsupported_value")
        required = constraint(body, raw, ignored)
        if required is not None and tool_use is not None and required[0] != "response_format":
            raise InvalidRequest(
                f"{required[0]} cannot be combined with a tool_choice that requires a call", required[0]
            )
        if tool_use is not None:  # response_format is the form of the content, of which a required call has none
            given["structured_outputs"] = tool_use.constraint
        elif required is not None:
            given["structured_outputs"] = required[1]
        try:
            params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
            plugins.check_params(self.processors, params)
        except InvalidRequest as error:
            if error.param == "extra_args" and body.vllm_xargs is not None:
                raise InvalidRequest(error.message, "vllm_xargs", error.code) from None
            raise
        if echo_logprobs is not None:
            num_logprobs = max(echo_logprobs, params.prompt_logprobs or 0)
            params = msgspec.structs.replace(params, prompt_logprobs=num_logprobs)
        check_params(params, self.limits)
        return params

    def _common(
        self,
        body: GenerationBody,
        params: SamplingParams,
        max_tokens: int | None,
        raw: Mapping[str, Any],
        ignored: Ignored,
        num_returned: int,
    ) -> dict[str, Any]:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        options = read(StreamOptions, body.stream_options or {}, "stream_options", ignored=ignored)
        session = None if body.session is None else _session(body.session, params, num_returned, ignored)
        return {
            "model": self.model(body.model),
            "params": params,
            "clamp_max_tokens": max_tokens is None,
            "num_returned": num_returned,
            "stream": body.stream,
            "stream_options": options,
            "prompt_logprobs": raw.get("prompt_logprobs"),
            "terms": Terms(body.priority, body.cache_salt, job_of(body, ignored)),
            "prompt_only": max_tokens == 0,
            "session": session,
            "returns_token_ids": body.return_token_ids,
            "ignored": ignored.names,
        }


def _one_prompt(value: Any) -> str | list[int]:
    """Return the one prompt of a piece, which may be empty: the tokens of its session come before it."""
    if value in ("", []):
        return []
    prompts = split_prompts(value)
    if len(prompts) > 1:
        raise InvalidRequest(f"prompt must be one prompt if session is given (got {len(prompts)})", "prompt")
    return prompts[0]


def _session(given: str | dict[str, Any], params: SamplingParams, num_returned: int, ignored: Ignored) -> SessionBody:
    """Return the session of a request, which must have one answer."""
    session = read(SessionBody, {"id": given} if isinstance(given, str) else given, "session", ignored=ignored)
    if params.use_beam_search or params.n != 1 or num_returned != 1:
        name = "use_beam_search" if params.use_beam_search else "n" if params.n == num_returned else "best_of"
        text = f"{name} cannot be combined with session, to which one answer is added"
        raise InvalidRequest(text, name, "unsupported_value")
    return session


def fork_request(request: CommonRequest, body: ForkBody, terms: Terms) -> CommonRequest:
    """Return the request of a fork: that of its parent, which had ``terms``, with the fields of ``body``."""
    params = msgspec.structs.replace(
        request.params,
        n=body.n,
        seed=body.seed,
        temperature=request.params.temperature if body.temperature is None else body.temperature,
        max_tokens=request.params.max_tokens if body.max_tokens is None else body.max_tokens,
        prompt_logprobs=None,
    )
    options = read(StreamOptions, body.stream_options or {}, "stream_options")
    return replace(
        request,
        params=params,
        num_returned=params.n,
        clamp_max_tokens=request.clamp_max_tokens and body.max_tokens is None,
        stream=body.stream,
        stream_options=options,
        prompt_logprobs=None,
        session=None,
        ignored=(),
        # A job whose last step has arrived gets no further request.
        terms=replace(terms, job=NO_JOB) if terms.job.is_last_step else terms,
    )


def ranked(params: SamplingParams, best_of: int, *, stream: bool) -> SamplingParams:
    """Return the parameters for ``best_of`` completions, of which the best ``params.n`` will be returned."""
    if best_of < params.n:
        raise InvalidRequest(f"best_of must be at least n, which is {params.n} (got {best_of})", "best_of")
    if stream:
        text = f"best_of must be n, which is {params.n}, if stream is true (got {best_of})"
        raise InvalidRequest(text, "best_of", "unsupported_value")
    if params.use_beam_search:
        raise InvalidRequest(f"best_of must be 1 with use_beam_search (got {best_of})", "best_of", "unsupported_value")
    return msgspec.structs.replace(params, n=best_of, logprobs=params.logprobs or 0)
