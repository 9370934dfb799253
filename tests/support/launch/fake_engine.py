"""An engine with made-up tokens, for tests of the application around it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from pooled_vectors import pooled_update
from pulled_sequence import PulledSequence
from tokenizers import Tokenizer

from quire.frontend.engine.job import Job
from quire.frontend.engine.scheduler_link import Readers
from quire.frontend.engine.update import Update
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.front_end_messages import AddRequest, EndReason, Statistics
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs
from quire.protocol.wire.timeline import TimelineEvent


@dataclass
class FakeSequence(PulledSequence):
    """Delivers tokens ``per_update`` at a time; stops for ever after ``hang_after`` tokens."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    tokens: list[int]
    per_update: int
    hang_after: int | None
    ending: EndReason | Exception
    detail: str
    on_abort: Callable[[], None]
    on_hang: Callable[[], None]
    stopped_at: int | None = None
    aborted: bool = False
    tool: str = ""
    delivered: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    pooled: Callable[[], Update] | None = None
    num_known: int = 0
    """Tokens that the request has from the start, which are the first update."""

    async def updates(self) -> AsyncIterator[Update]:
        if self.pooled is not None:
            await asyncio.sleep(0)
            self.delivered = 1
            yield self.pooled()
            return
        if self.delivered == 0 and isinstance(self.ending, InvalidRequest):
            raise self.ending
        tokens = self.tokens[: self.params.max_tokens]
        if self.num_known:
            self.delivered = self.num_known
            yield Update(tokens[: self.num_known], num_output_tokens=self.num_known)
        for begin in range(self.num_known, len(tokens), self.per_update):
            await asyncio.sleep(0)
            if self.hang_after is not None and self.delivered >= self.hang_after:
                self.waiting.set()
                self.on_hang()
                await asyncio.Event().wait()
            part = tokens[begin : begin + self.per_update]
            self.delivered = begin + len(part)
            last = self.delivered == len(tokens)
            if last and isinstance(self.ending, Exception):
                raise self.ending
            yield self._update(part, self._ended(len(tokens)) if last else None)

    def _ended(self, num_tokens: int) -> EndReason:
        assert isinstance(self.ending, EndReason)
        cut = num_tokens < len(self.tokens)
        return EndReason.LENGTH if cut else self.ending

    def _update(self, part: list[int], ended: EndReason | None) -> Update:
        wanted, given = self.params.logprobs, self.params.logprob_token_ids
        logprobs = None if wanted is None else [fake_logprobs(token, wanted) for token in part]
        if given:
            logprobs = [
                TokenLogprobs(token, -0.5, 1, [(each, given_logprob(each)) for each in given]) for token in part
            ]
        return Update(
            token_ids=part,
            logprobs=logprobs,
            ended=ended,
            num_output_tokens=self.delivered,
            num_cached_tokens=len(self.prompt) // 2,
            detail=self.detail if ended is EndReason.ERROR else "",
            prompt_logprobs=self._prompt_logprobs() if self.delivered == len(part) else None,
            routed_experts=self._routed_experts(len(part)) if self.params.return_routed_experts else None,
            timeline=fake_timeline(ended) if self.params.return_timeline else None,
        )

    def _routed_experts(self, num_new: int) -> np.ndarray[Any, Any]:
        """Return the rows of the positions that were computed since the last update, and one that is dropped."""
        computed = len(self.prompt) + self.delivered - 1
        before = computed - num_new if self.delivered > num_new else 0
        return fake_experts(computed + (self.delivered == len(self.tokens)))[before:]

    def _prompt_logprobs(self) -> LogprobArrays | None:
        """Return log probabilities in the engine's form: for all prompt tokens but the first, None for a prompt of one
        token."""
        if self.params.prompt_logprobs is None or len(self.prompt) == 1:
            return None
        return fake_prompt_logprobs(self.prompt)

    def stop_at(self, num_output_tokens: int) -> None:
        self.stopped_at = num_output_tokens

    def abort(self) -> None:
        self.aborted = True
        self.on_abort()

    def calls_tool(self, tool: str) -> None:
        self.tool = tool


def fake_timeline(ended: EndReason | None) -> list[TimelineEvent]:
    events = [TimelineEvent("queued", 10.0), TimelineEvent("scheduled", 10.5, tokens=2)]
    return events if ended is None else [*events, TimelineEvent("ended", 11.25)]


def fake_experts(num_rows: int) -> np.ndarray[Any, Any]:
    """Return rows of 2 layers with 2 experts each, of 300."""
    return (np.arange(4 * num_rows, dtype=np.int32) * 7 % 300).reshape(num_rows, 4)


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, [(token, -0.5), (5, -2.0), (6, float("-inf"))][:count])


def given_logprob(token: int) -> float:
    """Return the log probability of a token that a request has asked for."""
    return -1.0 - token % 5


def fake_prompt_logprobs(prompt: list[int]) -> LogprobArrays:
    """Token ``i`` has log probability -i and rank i + 1; the two best tokens are 5 and 6, with -0.25 and -inf."""
    num_tokens = len(prompt) - 1
    ids = np.array([[token, 5, 6] for token in prompt[1:]], np.int32)
    values = np.array([[-float(i), -0.25, -np.inf] for i in range(1, num_tokens + 1)], np.float32)
    return LogprobArrays(ids, values, np.arange(2, num_tokens + 2, dtype=np.int32))


@dataclass
class FakeEngine:
    """Answers every prompt with ``reply``, or with tokens that depend only on the seed."""

    tokenizer: Tokenizer | None
    reply: str | None = None
    ending: EndReason | Exception = EndReason.STOPPED
    detail: str = "the worker failed twice on this request"
    per_update: int = 1
    hang_after: int | None = None
    refuse: Exception | None = None
    on_abort: Callable[[], None] = lambda: None
    on_hang: Callable[[], None] = lambda: None
    state: str = "ready"
    pause_kind: str = ""
    seconds_without_progress: float = 0.0
    places: list[EnginePlace] = field(default_factory=list)
    max_model_len: int = 256
    vocab_size: int = 420
    added: list[FakeSequence] = field(default_factory=list)
    readers: Readers = field(default_factory=Readers)
    priorities: list[tuple[int, str]] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    adapters: list[AdapterRef | None] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    items: list[list[InputItem]] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    pool: Callable[[list[int], PoolingParams], Update] = pooled_update
    pooling: list[PoolingParams | None] = field(default_factory=list)
    figures: Statistics = field(
        default_factory=lambda: Statistics(
            query=1, num_running=3, num_waiting=2, num_usable_blocks=100, num_free_blocks=75, prefix_cache_hit_tokens=16
        )
    )

    async def add(
        self, request: AddRequest, on_update: Callable[[], None], *, parent: Any = None, num_shared: int = 0
    ) -> FakeSequence:
        params, seed = request.sampling, request.seed
        if self.refuse is not None:
            raise self.refuse
        assert params.n == 1
        assert params.stop == params.bad_words == []
        assert params.max_tokens is not None
        prompt, pooling = request.prompt_token_ids.tolist(), request.pooling
        assert len(prompt) + (0 if pooling else params.max_tokens) <= self.max_model_len
        sequence = FakeSequence(
            request.request_id,
            prompt,
            params,
            seed,
            self._tokens(seed),
            self.per_update,
            self.hang_after,
            self.ending,
            self.detail,
            self.on_abort,
            self.on_hang,
        )
        if request.output_token_ids is not None:
            sequence.num_known = len(request.output_token_ids)
            sequence.tokens[: sequence.num_known] = request.output_token_ids.tolist()
        if pooling is not None:
            sequence.pooled = partial(self.pool, prompt, pooling)
        self.pooling.append(pooling)
        sequence.start(self.readers, on_update)
        self.added.append(sequence)
        self.priorities.append((request.priority, request.cache_salt))
        self.adapters.append(request.adapter)
        self.items.append(request.items)
        self.jobs.append(Job(request.job_id, request.is_last_step, request.hint))
        return sequence

    def _tokens(self, seed: int) -> list[int]:
        if self.reply is None:
            return [3 + (seed >> (i % 56)) % 256 for i in range(400)]
        assert self.tokenizer is not None
        end = [2] if self.ending is EndReason.STOPPED else []
        return [*self.tokenizer.encode(self.reply).ids, *end]

    async def statistics(self) -> Statistics:
        if self.state == "failed":
            raise EngineError("gone")
        return self.figures

    async def statistics_by_engine(self) -> dict[int, Statistics]:
        return {0: await self.statistics()}

    async def control(self, kind: str) -> Statistics:
        self.controls.append(kind)
        self.pause_kind = {"pause": "pause", "pause_new": "pause_new", "resume": ""}.get(kind, self.pause_kind)
        return await self.statistics()

    async def ask(self, question: Callable[[int], Any], about: Callable[[AddRequest], bool]) -> Statistics:
        self.asked.append(question(0))
        return await self.statistics()
