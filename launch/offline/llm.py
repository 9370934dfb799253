"""The offline API: the engine's processes, used from Python without HTTP."""

import contextlib
import os
import secrets
import weakref
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, Unpack

from quire.frontend.engine.session import controls_of_pause
from quire.frontend.images.make import make_readers
from quire.frontend.images.options import ImageOptions
from quire.frontend.text.decisions.questions import Answer
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.prompts import check_template_variables, encode_messages, template_variables
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import parse_options
from quire.launch.offline.blocking_client import BlockingClient
from quire.launch.offline.call_options import CallOptions, RequestOptions
from quire.launch.offline.calls import OfflineCalls
from quire.launch.offline.engine_thread import EngineThread
from quire.launch.offline.pooled_input import RowsOutput
from quire.launch.offline.pooling_methods import PoolingMethods
from quire.launch.offline.prompt_input import PromptInput, is_single
from quire.launch.offline.request_output import EngineStatistics, RequestOutput
from quire.launch.offline.running import RunningRequest
from quire.launch.offline.session import OfflineSession
from quire.launch.supervision.supervisor import Supervisor
from quire.protocol.config import EngineConfig
from quire.protocol.request.sampling_params import MAX_N, SamplingParams, check_int, seed_for_sample
from quire.protocol.wire.front_end_messages import Control

OWN_IMAGES = ImageOptions(max_images_per_prompt=2**16, max_image_bytes=2**30)
"""Limits on images of the caller's own process, whose files may be larger than those of clients."""


class LLM(PoolingMethods):
    """An engine with its own scheduler and worker processes.

    These end with ``close``, at the end of ``with``, or when nothing refers to the LLM, its sessions and its running
    requests any more. They are of no use in a forked process.

    Keyword arguments are the flags of ``quire serve`` with underscores; ``logits_processors`` may hold classes, and
    ``speculative_config`` is a dictionary. Calls from several threads run one after the other.

    Raises:
        ConfigError: an unknown keyword (with the nearest known one), a value out of range, an unusable checkpoint.
        EngineError: a process failed to start, with the reason.
    """

    max_model_len: int
    vocab_size: int

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        parsed = parse_options({"model": model, **options}, "LLM")
        folder = find_model(parsed.model)
        config = make_engine_config(parsed, folder=folder)
        self._start(config, TextIn.load(folder, config.chat_template))

    @classmethod
    def from_config(cls, config: EngineConfig, *, quiet: bool = False) -> "LLM":
        """Create an engine from a complete configuration. With dummy weights there is no tokenizer."""
        llm = cls.__new__(cls)
        text_in = TextIn.load(Path(config.model_path), config.chat_template) if config.model_path else TextIn()
        llm._start(config, text_in, quiet=quiet)
        return llm

    def _start(self, config: EngineConfig, text_in: TextIn, *, quiet: bool = True) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.model.vocab_size
        markers = (config.thinking_start_token_ids, config.thinking_end_token_ids)
        text_in.protect(text_in.decode(ids, skip_special_tokens=False) for ids in markers)
        self._text_in = text_in
        self._calls = OfflineCalls(config, text_in)
        parts = contextlib.ExitStack()
        self._end = weakref.finalize(self._calls, _end, os.getpid(), parts)
        parts.callback(text_in.close)
        readers = make_readers(config, OWN_IMAGES, text_in.read_images)
        parts.callback(readers.close)
        self._calls.images, self._calls.rows = readers.images, readers.rows
        self._engine = EngineThread(
            lambda on_new_scheduler: Supervisor(config, quiet=quiet, on_new_scheduler=on_new_scheduler)
        )
        parts.callback(self._engine.close)
        self._calls.client = BlockingClient(config, self._engine.supervisor.directory, self._engine)
        parts.callback(self._calls.client.close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's processes; a call in another thread raises EngineError. May be called twice."""
        self._end()

    def generate(
        self,
        prompts: PromptInput | ListLike[PromptInput],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Complete one prompt or many. ``options``: as of CallOptions.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": str}``, ``{"prompt_token_ids": [...]}`` or
                ``{"prompt_embeds": tensor}`` (``[n, hidden_size]``, with ``enable_prompt_embeds``), or a list of these.
            sampling_params: one for all prompts, or one per prompt. None: ``default_sampling_params()``.

        Returns:
            One RequestOutput per prompt, in order.

        Raises:
            InvalidRequest: a prompt or a parameter is refused; all requests of the call are aborted.
            AdapterError: the adapter cannot be used, with its folder and the reason.
            EngineError: the engine has failed.
        """
        many: list[Any] = [prompts] if is_single(prompts) else list(prompts)
        return self._calls.run([self._calls.encode(prompt) for prompt in many], sampling_params, options)

    def beam_search(
        self, prompts: PromptInput | ListLike[PromptInput], beam_width: int, **params: Any
    ) -> list[RequestOutput]:
        """Search for the ``beam_width`` most likely outputs of each prompt; otherwise as ``generate``.

        Args:
            beam_width: from 1 to 64, and at most ``max_num_seqs``.
            params: options as of CallOptions, and other fields of SamplingParams, such as ``max_tokens``,
                ``length_penalty`` and ``early_stopping``.

        Returns:
            One RequestOutput per prompt, in order; its outputs have the highest ``score`` first.
        """
        options: Any = {name: params.pop(name) for name in CallOptions.__annotations__ if name in params}
        sampling = SamplingParams(use_beam_search=True, beam_width=beam_width, **params)
        return self.generate(prompts, sampling, **options)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or many with the checkpoint's chat template; otherwise as ``generate``.

        Args:
            messages: as of ``/v1/chat/completions``. An image may also be one of PIL:
                ``{"type": "image", "image": ...}`` or ``{"type": "image_pil", "image_pil": ...}``.
            tools: function descriptions for the template. Tool calls are not parsed; they stay in the text.
            chat_template_kwargs: variables for the template.
        """
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        variables = None if chat_template_kwargs is None else check_template_variables(chat_template_kwargs)
        for_template = ChatOptions(variables=variables, tools=tools)
        checked = [self._calls.conversation(each, for_template) for each in conversations]
        encoded = [encode_messages(*each, self._text_in, self) for each in checked]
        return self._calls.run(encoded, sampling_params, options)

    def decide(
        self,
        input: str | list[dict[str, Any]],
        questions: ListLike[dict[str, Any]],
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Answer]:
        """Answer predicate, choice and score questions about one text with probabilities (docs/decisions.md).

        The text is computed once. ``options``: as of RequestOptions.

        Args:
            input: a text, or a conversation as of ``chat``.
            questions: 1 to 400, with the fields of ``/v1/decisions``.
            chat_template_kwargs: variables for the template.

        Returns:
            One Answer per question, in order.

        Raises:
            InvalidRequest: the input or a question is refused, with its field.
            EngineError: the engine has failed.
        """
        messages = [{"role": "user", "content": input}] if isinstance(input, str) else input
        variables = template_variables("none", chat_template_kwargs)
        return self._calls.decide(messages, list(questions), variables, options)

    def start(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RunningRequest:
        """Begin one answer, and return it while it is generated. ``options``: as of RequestOptions.

        Args:
            prompt: as of ``generate``.
            sampling_params: with n 1, and without beam search or prompt log probabilities.

        Raises:
            InvalidRequest: the prompt or a parameter is refused.
            AdapterError: as ``generate``.
            EngineError: the engine has failed.
        """
        encoded, (params,) = self._calls.encode(prompt), self._calls.params_for(sampling_params, 1)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return self._calls.begin(encoded, params, seed_for_sample(seed, 0), options)

    def fork(
        self,
        request: RunningRequest,
        n: int = 1,
        *,
        num_tokens: int | None = None,
        seed: int | None = None,
        sampling_params: SamplingParams | None = None,
    ) -> list[RunningRequest]:
        """Begin ``n`` further answers that continue what has been read of a running one, and return them.

        Their prompt and first tokens are computed once. The request continues, and may be forked many times.

        Args:
            n: from 1 to 128.
            num_tokens: output tokens of the request that the answers begin with. None: all that have been read.
            seed: the answers have the seeds that ``n`` samples of one prompt would have. None: random ones.
            sampling_params: parameters for the answers, but for the seed. None: those of the request.

        Raises:
            InvalidRequest: the request has been read to its end, or a parameter is refused.
            EngineError: the engine has failed.
        """
        params = request.params
        if sampling_params is not None:
            (params,) = self._calls.params_for(sampling_params, 1)
        check_int("n", n, 1, MAX_N)
        first = secrets.randbits(64) if seed is None else check_int("seed", seed, -(2**63), 2**64 - 1)
        return [self._calls.fork(request, num_tokens, params, seed_for_sample(first, i)) for i in range(n)]

    @property
    def _capabilities(self) -> Capabilities:
        return self._calls.capabilities

    def _compute(self, *arguments: Any) -> list[RowsOutput]:
        return self._calls.pool(*arguments)

    def session(self) -> OfflineSession:
        """Open a session: a prompt that is given in pieces, with answers in between."""
        return OfflineSession(self._calls, self._text_in)

    def default_sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters with those that ``generation_config`` changes."""
        return self._calls.default_params()

    def statistics(self) -> EngineStatistics:
        """Return counters since the start, and current gauges."""
        return EngineStatistics(self._calls.ask(Control("statistics", 1)).counts())

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return False if requests hold blocks, without dropping any."""
        return self._calls.ask(Control("reset_prefix_cache", 1)).done

    def reset_encoder_cache(self) -> bool:
        """Drop the rows of all images; return False if requests need any, without dropping any."""
        return self._calls.ask(Control("reset_encoder_cache", 1)).done

    def pause(self, mode: str = "wait") -> None:
        """Pause the engine, and return at once. Calls that would wait for the end of the pause raise EngineError.

        Args:
            mode: wait: running requests finish, and no other begins; keep: nothing is computed, and running requests
                continue after ``resume``; abort: as wait, and all requests end with finish reason ``abort``.
        """
        for kind in controls_of_pause(mode):
            self._calls.ask(Control(kind, 1))

    def resume(self) -> None:
        """End the pause."""
        self._calls.ask(Control("resume", 1))


def _end(pid: int, parts: contextlib.ExitStack) -> None:
    """Close the parts of an LLM; in a forked process nothing, because they are those of its parent."""
    if os.getpid() == pid:
        parts.close()
