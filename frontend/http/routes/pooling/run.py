"""The inputs of one request in the engine: a bounded number at a time, results in their order."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.http.schema.errors import ApiError, aborted_request, as_api_error, failed_request
from quire.frontend.http.schema.pooling_requests import PooledRequest
from quire.frontend.http.schema.schema import ChatRequest
from quire.frontend.http.serving.metrics import SequenceClock
from quire.frontend.http.serving.server import Server
from quire.frontend.text.pooling.chat_texts import ChatText
from quire.frontend.text.pooling.inputs import for_prompt
from quire.frontend.text.pooling.pairs import TextPair
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.text_in import LONG_TEXT_CHARS
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.pooling_params import NO_SAMPLING
from quire.protocol.wire.front_end_messages import AddRequest, EndReason

WINDOW = 512
"""Inputs between the first one without a written result and the last one that was submitted."""
MAX_BYTES = 64 * 2**20
"""Size of the prompts and results of these inputs, unless it is one input."""
ENCODED_TOGETHER = 32
ENCODED_CHARS = 65536
"""Inputs, and characters, that are tokenized before others are served."""
RETRY_S = 0.05
"""Time after which an input is resubmitted, if the engine has refused it and has none of the request's."""
OWN_ERRORS = frozenset(("invalid_value", "context_length_exceeded", "kv_pool_too_small"))
"""Codes of a refusal by the scheduler that concerns one input only."""

MAX_AT_ONCE = 64
"""Inputs of which the failure of one is that of the request, so that it has an error status."""

Rows = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(slots=True)
class _Open:
    """One input in the engine. ``size``: bytes of its prompt and its result."""

    prompt: Prompt
    sequence: Stream
    clock: SequenceClock
    size: int


class InputRun(ABC, Generic[T]):
    """Submits inputs and returns what becomes of each: its result, or an error of this input alone.

    Attributes:
        task: what is computed, for the log.
        asked: what the client has asked for.
        fails_together: the error of one input is that of the request. All inputs are then tokenized first.
        clocks: of all inputs that were submitted, if requests are traced.
        num_prompt_tokens: of the inputs that have a result.
        num_cached_tokens: of these, found in the prefix cache.
    """

    task: str

    def __init__(self, server: Server, asked: PooledRequest | ChatRequest, num_inputs: int, request_id: str) -> None:
        self._server = server
        self.asked = asked
        self.num_inputs = num_inputs
        self._request_id = request_id
        self.fails_together = num_inputs <= MAX_AT_ONCE
        self._arrival = server.metrics.now()
        self._encoded: deque[tuple[int, Prompt]] = deque()
        self._open: dict[int, _Open] = {}
        self._done: dict[int, T | ApiError] = {}
        self._ready: deque[int] = deque()
        self._wake = asyncio.Event()
        self._next_encoded = self._num_returned = self._num_bytes = self._num_ended = 0
        self._is_refused = False
        """The scheduler's queue was full, and no input has ended since."""
        self.clocks: list[SequenceClock] = []
        self.num_prompt_tokens = self.num_cached_tokens = 0

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Return the prompt of an input; raise InvalidRequest if the input is refused."""

    @abstractmethod
    def request(self, request_id: str, index: int, prompt: Prompt, terms: Terms) -> AddRequest:
        """Return the request of an input."""

    @abstractmethod
    def outcome(self, update: Update) -> T | str:
        """Return the result of an input that has ended, or why there is none."""

    def num_ready(self) -> int:
        """Return the number of inputs that may be submitted now. The others wait until all of these have a result."""
        return self.num_inputs

    def num_chars(self, index: int) -> int:
        """Return the characters that making the prompt takes as long as tokenizing."""
        return 0

    def num_values(self, prompt: Prompt) -> int:
        """Return the number of float32 values of a result."""
        return 0

    async def results(self, terms: Terms) -> AsyncIterator[list[tuple[int, T | ApiError]]]:
        """Yield the outcomes in the order of the inputs, those that are known together.

        However this ends, no input is left in the engine.

        Raises:
            InvalidRequest, ApiError, EngineError: the whole request is refused, or the engine has failed.
        """
        num_inputs = self.num_inputs
        limit = self._server.key_queues.limit
        window = min(num_inputs, WINDOW, limit or WINDOW)
        with self._server.enter_queue(terms, window) as waiting:
            try:
                self._terms = await self._server.for_model(self.asked.model, terms)
                while self.fails_together and await self._encode(num_inputs):
                    pass
                while self._num_returned < num_inputs:
                    await self._submit(window)
                    if not self._ready and self._num_returned not in self._done:
                        await self._wait()
                    self._take()
                    waiting.reduce_to(num_inputs - self._num_ended)
                    if batch := self._in_order():
                        yield batch
            finally:
                for each in self._open.values():
                    each.sequence.abort()
                    each.clock.end("abort")

    async def _wait(self) -> None:
        """Wait for the engine to end an input, or to take one after it has refused all."""
        self._wake.clear()
        if self._open:
            await self._wake.wait()
        else:
            await asyncio.sleep(RETRY_S)
            self._is_refused = False

    def _in_order(self) -> list[tuple[int, T | ApiError]]:
        batch: list[tuple[int, T | ApiError]] = []
        while self._num_returned in self._done:
            batch.append((self._num_returned, self._done.pop(self._num_returned)))
            self._num_returned += 1
        return batch

    # ---- from inputs to the engine

    async def _submit(self, window: int) -> None:
        """Fill the window, unless results wait to be returned."""
        while not self._ready and self._num_returned not in self._done:
            if not self._encoded:
                if not await self._encode(window):
                    return
                continue
            index, prompt = self._encoded[0]
            size = 4 * (len(prompt.token_ids) + self.num_values(prompt))
            has_room = not self._open or self._num_bytes + size <= MAX_BYTES
            if not has_room or (self._is_refused and self._open):
                return
            if not await self._add(index, prompt, size):
                return
            self._encoded.popleft()

    async def _encode(self, window: int) -> bool:
        """Tokenize the next inputs; return False if there are none, or the window is full."""
        begin = self._next_encoded
        end = min(self.num_ready(), self._num_returned + window, begin + ENCODED_TOGETHER)
        num_chars, stop = 0, begin
        while stop < end and (stop == begin or num_chars < ENCODED_CHARS):
            num_chars += self.num_chars(stop)
            stop += 1
        if stop == begin:
            return False
        self._next_encoded = stop
        prompts = await self._server.texts.run(num_chars, lambda: [self._prompt(i) for i in range(begin, stop)])
        for index, found in enumerate(prompts, begin):
            if isinstance(found, Prompt):
                self._encoded.append((index, found))
            else:
                self._fail(index, found)
                self._num_ended += 1
        return True

    def _prompt(self, index: int) -> Prompt | InvalidRequest:
        try:
            return self.prompt(index)
        except InvalidRequest as error:
            return error

    async def _add(self, index: int, prompt: Prompt, size: int) -> bool:
        """Submit one input; return False if the engine takes no more at present."""
        try:
            request = self.request(f"{self._request_id}-{index}", index, prompt, self._terms)
            sequence = await self._server.engine.add(request, partial(self._note, index))
        except InvalidRequest as refused:
            if refused.code != "queue_full" or not (self._open or self._num_returned):
                raise
            self._is_refused = True
            return False
        clock = SequenceClock(self._server.metrics, self._arrival, len(prompt.token_ids))
        if self._server.settings.tracer is not None:
            self.clocks.append(clock)
        self._open[index] = _Open(prompt, sequence, clock, size)
        self._num_bytes += size
        return True

    # ---- from the engine to outcomes

    def _note(self, index: int) -> None:
        """The engine client's callback."""
        self._ready.append(index)
        self._wake.set()

    def _take(self) -> None:
        while self._ready:
            index = self._ready.popleft()
            each = self._open.get(index)
            if each is None:
                continue
            try:
                update = each.sequence.take()
            except InvalidRequest as refused:
                self._refuse(index, each, refused)
                continue
            if update is None or update.ended is None:
                continue
            self._close(index, each)
            self._is_refused = False
            self._end(index, each, update)

    def _refuse(self, index: int, each: _Open, refused: InvalidRequest) -> None:
        """Submit an input later if the scheduler's queue was full; otherwise it fails, alone if the reason is its own.

        Raises:
            InvalidRequest: the reason concerns all inputs.
        """
        self._close(index, each)
        if refused.code == "queue_full" and (self._open or self._num_returned):
            self._num_ended -= 1
            self._encoded.appendleft((index, each.prompt))
            self._is_refused = True
            return
        if refused.code not in OWN_ERRORS:
            raise refused
        each.clock.end("error")
        self._fail(index, refused)

    def _close(self, index: int, each: _Open) -> None:
        del self._open[index]
        self._num_bytes -= each.size
        self._num_ended += 1

    def _fail(self, index: int, error: ApiError | InvalidRequest) -> None:
        """Make this the outcome of an input, or raise it as that of the request."""
        if self.fails_together:
            raise error
        self._done[index] = as_api_error(error)

    def _end(self, index: int, each: _Open, update: Update) -> None:
        """Note the outcome of an input; raise ApiError if it ends the request, as an administrator's abort does."""
        assert update.ended is not None
        found = self.outcome(update)
        detail = found if isinstance(found, str) else ""
        reason = "error" if isinstance(found, str) and update.ended is EndReason.STOPPED else update.ended.finish_reason
        each.clock.record(
            OutputDelta("", [], None, reason, None, 0, update.num_cached_tokens, detail, None, update.admitted)
        )
        if reason == "abort":
            raise aborted_request()
        if isinstance(found, str):
            self._fail(index, failed_request(self._terms.without_path(detail)))
            return
        self._done[index] = found
        self.num_prompt_tokens += len(each.prompt.token_ids)
        self.num_cached_tokens += update.num_cached_tokens


class PooledRun(InputRun[Rows]):
    """The inputs of a request for vectors or scores, each of which becomes float32 ``[rows, width]``."""

    def __init__(self, server: Server, request: PooledRequest, request_id: str) -> None:
        super().__init__(server, request, len(request.inputs), request_id)
        self._encoder = server.input_encoder
        self._request = request
        self.task = request.params.task

    def prompt(self, index: int) -> Prompt:
        request = self._request
        return self._encoder.encode(
            request.inputs[index],
            request.truncation,
            request.field_of(index),
            add_special_tokens=request.add_special_tokens,
        )

    def request(self, request_id: str, index: int, prompt: Prompt, terms: Terms) -> AddRequest:
        request = terms.request(request_id, prompt, NO_SAMPLING, 0)
        return replace(request, pooling=for_prompt(self._request.params, prompt))

    def outcome(self, update: Update) -> Rows | str:
        if error := update.pooling_error:
            return error
        assert update.pooled is not None
        return update.pooled

    def num_chars(self, index: int) -> int:
        """Return the characters of an input, or its number of token ids. Rendering never runs on the event loop."""
        match given := self._request.inputs[index]:
            case ChatText():
                return len(given.text) + LONG_TEXT_CHARS + 1
            case TextPair():
                is_rendered = self._encoder.pooling.message_format != ""
                return len(given.first) + len(given.second) + is_rendered * (LONG_TEXT_CHARS + 1)
            case str() | list():
                return len(given)
            case _:
                return ENCODED_CHARS

    def num_values(self, prompt: Prompt) -> int:
        params = self._request.params
        num_rows = len(prompt.token_ids) if params.task == "token_embed" else 1
        return num_rows * self._encoder.pooling.width(params.task, params.dimensions)
