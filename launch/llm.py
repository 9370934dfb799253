"""The offline API: the same processes as the server's, driven from Python without HTTP."""

import atexit
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from tqdm import tqdm

from quire.launch.answers import Answer, Piece, PlacedLogprobs
from quire.launch.options import find_model, make_engine_config, parse_options
from quire.launch.prompts import Prompt, check_messages, check_params, encode_messages, encode_prompt, fit_params
from quire.launch.request_output import CompletionOutput, EngineStatistics, Logprob, RequestOutput
from quire.launch.streams import Stream, StreamTable
from quire.launch.supervisor import START_DEADLINE, Supervisor
from quire.launch.text_in import ChatOptions, TextIn
from quire.launch.text_out import TokenTexts
from quire.protocol.channel import Link
from quire.protocol.codec import ProtocolError
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    Control,
    EngineState,
    Hello,
    Message,
    Refused,
    Rejected,
    SchedulerToFrontEnd,
    Statistics,
    StepOutputs,
    Stop,
)
from quire.protocol.sampling_params import SamplingParams, seed_for_sample
from quire.protocol.zmq_channel import ZmqChannel, connect_hello, frontend_address

# Requests handed to the scheduler at once: more would only sit in sockets, whose queues are bounded.
MAX_SUBMITTED = 1024

PromptInput = str | list[int] | Mapping[str, Any]


class LLM:
    """An engine of its own: starts a scheduler and a worker process, and ends them with ``close`` or ``with``.

    Keyword arguments are the flags of ``quire serve`` with underscores. Usable from several threads, one at a time.

    Raises:
        ConfigError: an unknown keyword (with the nearest known one), a value out of range, an unusable checkpoint.
        EngineError: a process did not come up; says why.
    """

    max_model_len: int
    vocab_size: int

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        parsed = parse_options({"model": model, **options}, "LLM")
        folder = find_model(parsed.model)
        self._start(make_engine_config(parsed, folder=folder), TextIn.load(folder))

    @classmethod
    def from_config(cls, config: EngineConfig, *, quiet: bool = False) -> "LLM":
        """An engine by a finished configuration, random weights of a named shape included; no tokenizer then."""
        llm = cls.__new__(cls)
        llm._start(config, TextIn.load(Path(config.model_path)) if config.model_path else TextIn(), quiet=quiet)
        return llm

    def _start(self, config: EngineConfig, text_in: TextIn, *, quiet: bool = True) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.vocab_size = config.model.vocab_size
        self._text_in = text_in
        self._token_texts = TokenTexts(text_in.tokenizer)
        self._lock = threading.Lock()
        self._table = StreamTable()
        self._statistics: Statistics | None = None
        self._num_requests = 0
        self._supervisor = Supervisor(config, quiet=quiet)
        self._channel: ZmqChannel | None = None
        atexit.register(_close_if_alive, weakref.ref(self))
        try:
            self._supervisor.start_engine()
            self._supervisor.wait_ready()
            self._channel = self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> ZmqChannel:
        address = frontend_address(self._supervisor.directory)
        channel = ZmqChannel(zmq.Context.instance(), zmq.DEALER, address, Link(SchedulerToFrontEnd), bind=False)
        answer = connect_hello(channel, Hello(PROTOCOL_VERSION, "frontend", 0, 0), time.monotonic() + START_DEADLINE)
        if isinstance(answer, Refused):
            raise EngineError(answer.reason)
        return channel

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._supervisor.stop()

    def generate(
        self,
        prompts: PromptInput | ListLike[PromptInput],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``, or a list
                of these.
            sampling_params: one for all, or one for each prompt.

        Returns:
            One RequestOutput per prompt, in order.

        Raises:
            InvalidRequest: a prompt or a parameter is refused; nothing is left running.
            EngineError: the engine died.
        """
        many: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        encoded = [self._encode(prompt) for prompt in many]
        return self._run(encoded, self._params_for(sampling_params, len(encoded)), use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the checkpoint's chat template."""
        one = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if one else list(messages)
        encoded = [encode_messages(check_messages(c), ChatOptions(), self._text_in, self) for c in conversations]
        return self._run(encoded, self._params_for(sampling_params, len(encoded)), use_tqdm)

    def statistics(self) -> EngineStatistics:
        """Counters since start, and gauges as of now: see the Statistics message."""
        with self._lock:
            return self._ask(Control("statistics", 1))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when requests still hold blocks."""
        with self._lock:
            return bool(self._ask(Control("reset_prefix_cache", 1))["done"])

    def _ask(self, control: Control) -> EngineStatistics:
        self._statistics = None
        self._send(control)
        while self._statistics is None:
            self._receive()
        fields = self._statistics.__struct_fields__
        return EngineStatistics({name: int(getattr(self._statistics, name)) for name in fields if name != "query"})

    # ---- one call of generate

    def _encode(self, prompt: PromptInput) -> Prompt:
        if isinstance(prompt, Mapping):
            keys = set(prompt) & {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not keys:
                raise InvalidRequest('a prompt must be {"prompt": str} or {"prompt_token_ids": [...]}', "prompt")
            prompt = prompt[keys.pop()]
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, str | list):
            raise InvalidRequest("prompt must be a string or a list of token ids", "prompt")
        return encode_prompt(prompt, self._text_in, self)

    def _params_for(
        self, given: SamplingParams | ListLike[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        params = [given or SamplingParams()] * num_prompts if isinstance(given, SamplingParams | None) else list(given)
        if len(params) != num_prompts:
            raise InvalidRequest(f"{len(params)} sampling_params for {num_prompts} prompts", "sampling_params")
        for each in params:
            check_params(each, self)
        return params

    def _run(self, prompts: list[Prompt], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        with self._lock:
            run = _Run(self, prompts, params)
            try:
                with tqdm(total=len(prompts), desc="Requests", disable=not use_tqdm) as bar:
                    run.finish(bar)
            except BaseException:
                run.abort()
                raise
            return run.outputs

    def _send(self, message: Message) -> None:
        if self._channel is None:
            raise EngineError("this LLM is closed")
        self._channel.send(message)

    def _receive(self) -> None:
        """Wait for a message, or notice that a process died."""
        if self._channel is None:
            raise EngineError("this LLM is closed")
        try:
            received = self._channel.receive(0.5)
        except ProtocolError as error:
            raise EngineError(f"the link to the scheduler is broken: {error}") from None
        if received is None:
            self._supervisor.watch(0.0)
            return
        match received.message:
            case StepOutputs() as outputs:
                self._table.apply(outputs)
            case Rejected() as rejected:
                self._table.reject(rejected)
            case Statistics() as statistics:
                self._statistics = statistics
            case EngineState(kind="failed", detail=detail) | Refused(reason=detail):
                self._table.fail(detail)
                self._supervisor.watch(1.0)
                raise EngineError(detail)
            case _:
                pass


class _OfflineSequence:
    """What an Answer needs of a sequence when nobody awaits: a stop and an abort."""

    def __init__(self, llm: LLM, stream: Stream) -> None:
        self.request_id = stream.request_id
        self.stream = stream
        self._llm = llm

    def stop_at(self, num_output_tokens: int) -> None:
        self._end(Stop(self.request_id, num_output_tokens))

    def abort(self) -> None:
        self._end(Abort([self.request_id]))

    def _end(self, message: Message) -> None:
        if not self.stream.over and not self.stream.muted:
            self._llm._send(message)
        self.stream.muted = True


@dataclass(slots=True)
class _Sample:
    """One answer of one prompt on its way."""

    prompt: int
    output: CompletionOutput
    answer: Answer
    sequence: _OfflineSequence


class _Run:
    """One call of ``generate``: feeds requests in, collects what comes."""

    def __init__(self, llm: LLM, prompts: list[Prompt], params: list[SamplingParams]) -> None:
        self._llm = llm
        self._prompts = prompts
        self._params = params
        self._touched: deque[_Sample] = deque()
        self._open: dict[str, _Sample] = {}
        self._left = [p.n for p in params]
        self._waiting = iter([(p, i) for p in range(len(prompts)) for i in range(params[p].n)])
        self._seeds = [secrets.randbits(64) if p.seed is None else p.seed for p in params]
        self.outputs: list[RequestOutput] = []
        for prompt, own in zip(prompts, params, strict=True):
            llm._num_requests += 1
            completions = [CompletionOutput(i) for i in range(own.n)]
            name = f"offline-{llm._num_requests}"
            self.outputs.append(RequestOutput(name, prompt.text, prompt.token_ids.tolist(), completions))

    def finish(self, bar: "tqdm[Any]") -> None:
        self._submit()
        while self._open:
            self._llm._receive()
            while self._touched:
                self._advance(self._touched.popleft(), bar)
            self._submit()

    def abort(self) -> None:
        """Leave nothing running, if the engine still listens."""
        for sample in self._open.values():
            try:
                sample.answer.abort()
            except EngineError:
                return

    def _submit(self) -> None:
        for prompt, index in _take(self._waiting, MAX_SUBMITTED - len(self._open)):
            self._start(prompt, index)

    def _start(self, prompt: int, index: int) -> None:
        llm, params, output = self._llm, self._params[prompt], self.outputs[prompt]
        request_id = f"{output.request_id}-{index}"
        token_ids = self._prompts[prompt].token_ids
        stream = llm._table.add(request_id, lambda: self._touched.append(self._open[request_id]))
        sequence = _OfflineSequence(llm, stream)
        answer = Answer(sequence, llm._text_in, self._prompts[prompt], params)
        self._open[request_id] = _Sample(prompt, output.outputs[index], answer, sequence)
        fitted = fit_params(params, self._prompts[prompt], llm, clamp=True)
        seed = seed_for_sample(self._seeds[prompt], index)
        llm._send(AddRequest(request_id, token_ids, fitted, seed, arrival=time.monotonic()))

    def _advance(self, sample: _Sample, bar: "tqdm[Any]") -> None:
        update = sample.sequence.stream.take()
        if update is None:
            return
        piece = sample.answer.assemble(update)
        self._append(sample.output, piece)
        if piece.finish_reason is None:
            return
        if piece.finish_reason == "error":
            raise EngineError(piece.detail)
        del self._open[sample.sequence.request_id]
        output = self.outputs[sample.prompt]
        output.num_cached_tokens = max(output.num_cached_tokens, piece.num_cached_tokens)
        self._left[sample.prompt] -= 1
        if not self._left[sample.prompt]:
            output.finished = True
            bar.update()

    def _append(self, output: CompletionOutput, piece: Piece) -> None:
        output.text += piece.text
        output.token_ids += piece.token_ids
        output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.logprobs is not None:
            output.logprobs = (output.logprobs or []) + [self._logprobs(placed) for placed in piece.logprobs]
            total = sum(placed.logprobs.logprob for placed in piece.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + total

    def _logprobs(self, placed: PlacedLogprobs) -> dict[int, Logprob]:
        entry, text = placed.logprobs, self._llm._token_texts.text
        found = {token: Logprob(value, rank, text(token)) for rank, (token, value) in enumerate(entry.top, 1)}
        found[entry.token_id] = Logprob(entry.logprob, entry.rank, text(entry.token_id))
        return found


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping | np.ndarray):
        return True
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int | np.integer)


def _take(items: Iterator[tuple[int, int]], n: int) -> Iterable[tuple[int, int]]:
    for _ in range(n):
        item = next(items, None)
        if item is None:
            return
        yield item


def _close_if_alive(ref: "weakref.ref[LLM]") -> None:
    llm = ref()
    if llm is not None:
        llm.close()
