"""One call of the offline API: submits its requests, a bounded number at a time, and collects their outputs."""

import heapq
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from tqdm import tqdm

from quire.frontend.engine.answers import Answer, BeamOutput, OutputDelta
from quire.frontend.engine.job import NO_JOB, Job
from quire.frontend.engine.session import Session
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.text.logprob import logprob_by_id
from quire.frontend.text.prompts import ModelLimits, Prompt, fit_params
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import TokenTexts
from quire.launch.offline.request_output import CompletionOutput, RequestOutput, append_delta
from quire.protocol.config import EngineConfig
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams, seed_for_sample
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.front_end_messages import AddRequest

# Maximum number of requests in flight. More would only fill the sockets' bounded queues.
MAX_SUBMITTED = 1024


class BlockingEngine(ModelLimits, Protocol):
    """The engine, for a blocking caller."""

    config: EngineConfig
    session: Session

    def submit(self, request: AddRequest, on_update: Callable[[], None], parent: Stream | None = None) -> Stream:
        """Submit a request; raise EngineError if the client is closed. ``parent``: as of ``Session.add``."""
        ...

    def wait(self) -> None:
        """Wait a bounded time for a message and apply it to the stream table.

        Raises:
            EngineError: the engine has failed, or a pause stops what the caller waits for.
        """
        ...


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One prompt of a call, for which ``params.n`` answers are generated."""

    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    adapter: AdapterRef | None = None
    job: Job = NO_JOB


@dataclass(slots=True)
class _Sample:
    """One answer in flight. ``queued``: it has received no token yet, so it may be in the waiting queue."""

    order: int
    prompt: int
    index: int
    answer: Answer
    stream: Stream
    queued: bool = True


class Batch:
    """The requests of one call, the answers in flight, and the outputs in the order of the prompts.

    The number of queued requests is kept below the scheduler's queue limit. A request can still be refused, because
    preempted requests wait in the queue too; it is resubmitted later. The queue limit never fails a call.
    """

    def __init__(
        self,
        engine: BlockingEngine,
        text_in: TextIn,
        token_texts: TokenTexts,
        requests: list[BatchRequest],
        on_text: Callable[[int, str], None] | None = None,
    ) -> None:
        """``on_text``: called with (index of the prompt, new text) of each prompt's first answer."""
        self._engine = engine
        self._text_in = text_in
        self._token_texts = token_texts
        self._requests = requests
        self._fitted = [fit_params(each.params, each.prompt, engine, clamp=True) for each in requests]
        self._on_text = on_text
        self._max_queued = engine.config.max_num_queued_reqs or MAX_SUBMITTED
        self._touched: deque[str] = deque()
        self._open: dict[str, _Sample] = {}
        self._roots: dict[int, Stream] = {}
        """By prompt, the answer in flight that further ones are forked from."""
        self._num_queued = 0
        self._refused = False
        """A request was refused because the queue was full, and no update has arrived since the refusal."""
        self._left = [r.params.n for r in requests]
        urgent = engine.config.scheduling_policy == "priority"
        # A heap of (priority, prompt, sample), so that requests of the best priority are submitted first.
        self._to_submit = [
            (r.priority if urgent else 0, p, i) for p, r in enumerate(requests) for i in range(r.params.n)
        ]
        heapq.heapify(self._to_submit)
        self._seeds = [secrets.randbits(64) if r.params.seed is None else r.params.seed for r in requests]
        self.outputs = [
            RequestOutput(r.name, r.prompt.text, r.prompt.token_ids.tolist(), list(map(CompletionOutput, range(n))))
            for r, n in zip(requests, self._left, strict=True)
        ]

    def finish(self, bar: "tqdm[Any]") -> None:
        """Run until all requests have finished.

        Raises:
            InvalidRequest: the scheduler refused a request.
            EngineError: the engine has failed.
        """
        self._submit()
        while self._open:
            self._engine.wait()
            while self._touched:
                if sample := self._open.get(self._touched.popleft()):  # else ended, if ``on_text`` makes calls
                    self._advance(sample, bar)
            self._submit()

    def abort(self) -> None:
        """Abort all requests in flight, unless the engine has failed."""
        for sample in self._open.values():
            try:
                sample.answer.abort()
            except EngineError:
                return

    def _submit(self) -> None:
        if self._refused and self._open:
            return
        while self._to_submit and len(self._open) < MAX_SUBMITTED and self._num_queued < self._max_queued:
            self._start(*heapq.heappop(self._to_submit))

    def _start(self, order: int, prompt: int, index: int) -> None:
        engine, request = self._engine, self._requests[prompt]
        request_id = f"{request.name}-{index}"
        params, fitted = request.params, self._fitted[prompt]
        if index and params.prompt_logprobs is not None:
            # Only a prompt's first answer computes these, so that the other answers can hit the prefix cache.
            params, fitted = (msgspec.structs.replace(each, prompt_logprobs=None) for each in (params, fitted))
        is_last = all(other != prompt for _, other, _ in self._to_submit)
        terms, seed = Terms(request.priority, "", request.job, 0, request.adapter), self._seeds[prompt]
        added = terms.request(request_id, request.prompt, fitted, seed_for_sample(seed, index), is_last=is_last)
        root = self._roots.get(prompt)
        stream = engine.submit(added, lambda: self._touched.append(request_id), root)
        if root is None or root.over:
            self._roots[prompt] = stream
        answer = Answer(stream, self._text_in, request.prompt, params)
        self._open[request_id] = _Sample(order, prompt, index, answer, stream)
        self._num_queued += 1

    def _advance(self, sample: _Sample, bar: "tqdm[Any]") -> None:
        try:
            update = sample.stream.take()
        except InvalidRequest as refused:
            if refused.code != "queue_full":
                raise
            self._put_back(sample)
            return
        if update is None:
            return
        self._refused = False
        self._leave_queue(sample)
        delta = sample.answer.assemble(update)
        output, moe = self.outputs[sample.prompt].outputs[sample.index], self._engine.config.model.moe
        append_delta(output, delta, self._token_texts, moe)
        if self._on_text is not None and delta.text and not sample.index:
            self._on_text(sample.prompt, delta.text)
        if delta.prompt_logprobs is not None:
            num_best = self._requests[sample.prompt].params.prompt_logprobs or 0
            entries = [logprob_by_id(entry, self._token_texts) for entry in delta.prompt_logprobs.entries(num_best)]
            self.outputs[sample.prompt].prompt_logprobs = [None, *entries]
        if delta.beams is not None:
            self.outputs[sample.prompt].outputs = [_of_beam(i, beam) for i, beam in enumerate(delta.beams)]
        if delta.finish_reason is None:
            return
        if delta.beams is None:
            self.outputs[sample.prompt].outputs[sample.index].error = delta.detail or None
        self._end(sample, delta, bar)

    def _end(self, sample: _Sample, delta: OutputDelta, bar: "tqdm[Any]") -> None:
        del self._open[sample.stream.request_id]
        output = self.outputs[sample.prompt]
        if not sample.index:  # the others may be forks of it, which compute no prompt
            output.num_cached_tokens = delta.num_cached_tokens
        self._left[sample.prompt] -= 1
        if not self._left[sample.prompt]:
            output.finished = True
            bar.update()

    def _put_back(self, sample: _Sample) -> None:
        """Resubmit this request later, once another answer has received an update."""
        del self._open[sample.stream.request_id]
        self._leave_queue(sample)
        self._refused = True
        heapq.heappush(self._to_submit, (sample.order, sample.prompt, sample.index))

    def _leave_queue(self, sample: _Sample) -> None:
        self._num_queued -= sample.queued
        sample.queued = False


def _of_beam(index: int, beam: BeamOutput) -> CompletionOutput:
    ended = beam.finish_reason, beam.stop_reason
    return CompletionOutput(index, beam.text, beam.token_ids, beam.logprob, None, *ended, score=beam.score)
