"""The offline API: the engine's processes, used from Python without HTTP."""

import atexit
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quire.launch.adapters.reader import AdapterReader
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import parse_options
from quire.launch.frontend.job import Job
from quire.launch.offline.batch import Batch, BatchRequest
from quire.launch.offline.blocking_client import BlockingClient
from quire.launch.offline.engine_thread import EngineThread
from quire.launch.offline.jobs import JobIds, jobs_for
from quire.launch.offline.lora_request import LoRARequest, adapters_for
from quire.launch.offline.request_output import EngineStatistics, RequestOutput
from quire.launch.offline.running import Reading, RunningRequest, begin, num_shared
from quire.launch.offline.session import OfflineSession, PromptInput
from quire.launch.supervision.supervisor import Supervisor
from quire.launch.text.messages import check_messages
from quire.launch.text.prompts import (
    Prompt,
    check_params,
    check_template_variables,
    encode_messages,
    encode_prompt,
    tokenize_bad_words,
)
from quire.launch.text.text_in import ChatOptions, TextIn
from quire.launch.text.text_out import TokenTexts
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY, EngineConfig
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request import plugins
from quire.protocol.request.sampling_params import MAX_N, SamplingParams, check_int, seed_for_sample
from quire.protocol.wire.front_end_messages import Control, Statistics

LoRAInput = LoRARequest | ListLike[LoRARequest | None] | None
OnText = Callable[[int, str], None]


class LLM:
    """An engine with its own scheduler and worker processes, which end with ``close`` or at the end of ``with``.

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
        self._token_texts = TokenTexts(text_in.tokenizer)
        self._processors = plugins.load_logits_processors(config.logits_processors, config.logits_processors_exclude)
        self._adapters = AdapterReader(config.model, config.max_lora_rank) if config.enable_lora else None
        self._lock = threading.Lock()
        self._num_requests = self._num_sessions = 0
        self._client: BlockingClient | None = None
        self._engine = EngineThread(
            lambda on_new_scheduler: Supervisor(config, quiet=quiet, on_new_scheduler=on_new_scheduler)
        )
        atexit.register(_close_if_alive, weakref.ref(self))
        self._client = BlockingClient(config, self._engine.supervisor.directory, self._engine)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        self._text_in.close()
        if self._client is not None:
            self._client.close()
            self._client = None
        self._engine.close()

    def generate(
        self,
        prompts: PromptInput | ListLike[PromptInput],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: LoRAInput = None,
        priority: int | ListLike[int] | None = None,
        on_text: OnText | None = None,
        job_id: JobIds = None,
        is_last_step: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``, or a list
                of these.
            sampling_params: one for all prompts, or one per prompt. None: ``default_sampling_params()``.
            lora_request: the LoRA adapter for all prompts, or one per prompt. It needs ``enable_lora=True``.
            priority: one for all prompts, or one per prompt; lower values are scheduled first. It has no effect unless
                ``scheduling_policy="priority"``.
            on_text: called with (index of the prompt, new text) of each prompt's first answer, as it is generated.
            job_id: the agent or conversation of which all prompts are turns, or one per prompt (docs/agents.md).
            is_last_step: nothing follows these turns.

        Returns:
            One RequestOutput per prompt, in order.

        Raises:
            InvalidRequest: a prompt or a parameter is refused; all requests of the call are aborted.
            AdapterError: the adapter cannot be used, with its folder and the reason.
            EngineError: the engine has failed.
        """
        many: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        encoded = [self._encode(prompt) for prompt in many]
        jobs = jobs_for(job_id, len(encoded), is_last_step=is_last_step)
        return self._run(encoded, sampling_params, priority, use_tqdm, on_text, lora_request, jobs)

    def beam_search(
        self,
        prompts: PromptInput | ListLike[PromptInput],
        beam_width: int,
        *,
        use_tqdm: bool = False,
        lora_request: LoRAInput = None,
        priority: int | ListLike[int] | None = None,
        **params: Any,
    ) -> list[RequestOutput]:
        """Search for the ``beam_width`` most likely outputs of each prompt; otherwise as ``generate``.

        Args:
            beam_width: from 1 to 64, and at most ``max_num_seqs``.
            params: other fields of SamplingParams, such as ``max_tokens``, ``length_penalty`` and ``early_stopping``.

        Returns:
            One RequestOutput per prompt, in order; its outputs have the highest ``score`` first.
        """
        sampling = SamplingParams(use_beam_search=True, beam_width=beam_width, **params)
        return self.generate(prompts, sampling, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = False,
        lora_request: LoRAInput = None,
        priority: int | ListLike[int] | None = None,
        on_text: OnText | None = None,
        job_id: JobIds = None,
        is_last_step: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many with the checkpoint's chat template; otherwise as ``generate``.

        Args:
            tools: function descriptions for the template. Tool calls are not parsed; they stay in the text.
            chat_template_kwargs: variables for the template.
        """
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        variables = None if chat_template_kwargs is None else check_template_variables(chat_template_kwargs)
        options = ChatOptions(variables=variables, tools=tools)
        encoded = [encode_messages(check_messages(c), options, self._text_in, self) for c in conversations]
        jobs = jobs_for(job_id, len(encoded), is_last_step=is_last_step)
        return self._run(encoded, sampling_params, priority, use_tqdm, on_text, lora_request, jobs)

    def start(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> RunningRequest:
        """Begin one answer, and return it while it is generated.

        Args:
            prompt, lora_request, priority: as of ``generate``.
            sampling_params: with n 1, and without beam search or prompt log probabilities.

        Raises:
            InvalidRequest: the prompt or a parameter is refused.
            AdapterError: as ``generate``.
            EngineError: the engine has failed.
        """
        encoded, (params,) = self._encode(prompt), self._params_for(sampling_params, 1)
        (order,) = _priorities_for(priority, 1)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        (adapter,) = adapters_for(lora_request, 1, self._adapters)
        return self._begin(encoded, params, order, seed_for_sample(seed, 0), adapter=adapter)

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
            (params,) = self._params_for(sampling_params, 1)
        check_int("n", n, 1, MAX_N)
        first = secrets.randbits(64) if seed is None else check_int("seed", seed, -(2**63), 2**64 - 1)
        fork = {"parent": request, "num_shared": num_shared(request, num_tokens, params)}
        order = request.sequence.stream.request.priority
        return [self._begin(request.prompt, params, order, seed_for_sample(first, i), **fork) for i in range(n)]

    def session(self) -> OfflineSession:
        """Open a session: a prompt that is given in pieces, with answers in between."""
        with self._lock:
            self._num_sessions += 1
            name = f"session-{self._num_sessions}"
        job = Job(name, hint="session")
        return OfflineSession(
            name,
            lambda prompt, special: self._encode(prompt, add_special_tokens=special),
            lambda prompt, params: self._run([prompt], params, None, False, None, None, [job])[0],
            self._text_in,
            self,
        )

    def default_sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters with those that ``generation_config`` changes."""
        given: dict[str, Any] = dict(self.config.sampling_defaults)
        return SamplingParams(**given)

    def statistics(self) -> EngineStatistics:
        """Return counters since the start, and current gauges."""
        return EngineStatistics.of(self._ask(Control("statistics", 1)))

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return False if requests hold blocks, without dropping any."""
        return self._ask(Control("reset_prefix_cache", 1)).done

    def _ask(self, control: Control) -> Statistics:
        with self._lock:
            return self._open_client().ask(control)

    def _begin(self, prompt: Prompt, params: SamplingParams, priority: int, seed: int, **more: Any) -> RunningRequest:
        with self._lock:
            reading = Reading(self._open_client(), self._text_in, self._token_texts, self._lock)
            self._num_requests += 1
            return begin(reading, f"offline-{self._num_requests}", prompt, params, priority, seed, **more)

    # ---- one call of generate

    def _encode(self, prompt: PromptInput, *, add_special_tokens: bool = True) -> Prompt:
        if isinstance(prompt, Mapping):
            keys = set(prompt) & {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not keys:
                raise InvalidRequest('a prompt must be {"prompt": str} or {"prompt_token_ids": [...]}', "prompt")
            prompt = prompt[keys.pop()]
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, str | list):
            raise InvalidRequest("prompt must be a string or a list of token ids", "prompt")
        return encode_prompt(prompt, self._text_in, self, add_special_tokens=add_special_tokens)

    def _params_for(
        self, given: SamplingParams | ListLike[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        one = self.default_sampling_params() if given is None else given
        params = [one] * num_prompts if isinstance(one, SamplingParams) else list(one)
        if len(params) != num_prompts:
            raise InvalidRequest(f"{len(params)} sampling_params for {num_prompts} prompts", "sampling_params")
        for each in params:
            check_params(each, self)
            plugins.check_params(self._processors, each)
        return [tokenize_bad_words(each, self._text_in, self) for each in params]

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None,
        priority: int | ListLike[int] | None,
        use_tqdm: bool,
        on_text: OnText | None,
        lora_request: LoRAInput,
        jobs: list[Job],
    ) -> list[RequestOutput]:
        each_params = self._params_for(params, len(prompts))
        each_priority = _priorities_for(priority, len(prompts))
        each_adapter = adapters_for(lora_request, len(prompts), self._adapters)
        with self._lock:
            first = self._num_requests + 1
            self._num_requests += len(prompts)
            requests = [
                BatchRequest(f"offline-{first + i}", *each)
                for i, each in enumerate(zip(prompts, each_params, each_priority, each_adapter, jobs, strict=True))
            ]
            batch = Batch(self._open_client(), self._text_in, self._token_texts, requests, on_text)
            try:
                with tqdm(total=len(prompts), desc="Requests", disable=not use_tqdm) as bar:
                    batch.finish(bar)
            except BaseException:
                batch.abort()
                raise
            return batch.outputs

    def _open_client(self) -> BlockingClient:
        if self._client is None:
            raise EngineError("this LLM is closed")
        return self._client


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping | np.ndarray):
        return True
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int | np.integer)


def _priorities_for(given: int | ListLike[int] | None, num_prompts: int) -> list[int]:
    each = list(given) if isinstance(given, ListLike) else [0 if given is None else given] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequest(f"{len(each)} priorities for {num_prompts} prompts", "priority")
    return [check_int("priority", value, MIN_PRIORITY, MAX_PRIORITY) for value in each]


def _close_if_alive(ref: "weakref.ref[LLM]") -> None:
    llm = ref()
    if llm is not None:
        llm.close()
