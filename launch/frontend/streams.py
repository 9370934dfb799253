"""Which answers are in flight, and what each step brings them: the front end's bookkeeping, without any I/O.

The asynchronous client (HTTP) and the blocking one (the offline API) both stand on it.
"""

from array import array
from collections.abc import Callable

import msgspec
import numpy as np

from quire.launch.frontend.engine_client import Update
from quire.protocol.errors import EngineError, InvalidRequest, QuireError
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import AddRequest, EndReason, Rejected, StepOutputs
from quire.protocol.wire.logprobs import LogprobArrays, Logprobs


class Stream:
    """One sampled answer: what was asked, all tokens that came, and what of it was not taken yet.

    Attributes:
        request: as it was first submitted.
        tokens: of the answer so far, int32: what another scheduler is told, should this one die.
        life: of the session's link on which it was submitted last; 0 before.
        handle: the scheduler's number for it; None before its first message.
        error: set instead of an ending when the request was refused or the engine died.
        muted: it is not read any more; what still comes is dropped.
        over: nothing will come any more.
    """

    def __init__(self, request: AddRequest, on_update: Callable[[], None] | None = None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.tokens = array("i")
        self.link_number = 0
        self._num_deaths = self._num_tokens_at_death = 0
        self._on_update = on_update
        self.handle: int | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = -1
        self.error: QuireError | None = None
        self.muted = False
        self.over = False
        self._update: Update | None = None
        self._prompt_logprobs: LogprobArrays | None = None

    def take(self) -> Update | None:
        """What piled up since the last call; None when nothing did. Raises the error if there is one."""
        if self.error is not None:
            raise self.error
        update, self._update = self._update, None
        if update is not None:
            update.num_output_tokens = self.num_output_tokens
            update.num_cached_tokens = max(self.num_cached_tokens, 0)
            update.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return update

    def submission(self) -> AddRequest:
        """The request; after the first time, to be gone on with behind what came of it."""
        if not self.link_number:
            return self.request
        delivered = np.array(self.tokens, np.int32) if self.tokens else None
        return msgspec.structs.replace(self.request, output_token_ids=delivered, resubmitted=True)

    @property
    def num_deaths(self) -> int:
        """How many schedulers died with it since it last got a token."""
        return self._num_deaths if len(self.tokens) == self._num_tokens_at_death else 0

    def note_death(self) -> None:
        self._num_deaths, self._num_tokens_at_death = self.num_deaths + 1, len(self.tokens)

    def notify(self) -> None:
        """Wake the reader: something came."""
        if self._on_update is not None and not self.muted:
            self._on_update()

    def place_prompt_logprobs(self, start: int, part: LogprobArrays) -> None:
        """Keep a part of the prompt's log probabilities, from prompt token ``start`` on, for the first update.

        Parts that come again with a later token, after a preemption, were delivered before. Parts may differ in width:
        the columns that all of them have are those that were asked for.
        """
        if not self.muted and not self.num_output_tokens:
            self._prompt_logprobs = (self._prompt_logprobs or LogprobArrays.empty()).overlaid(start - 1, part)

    def pending(self) -> Update:
        """The update being gathered, for the table to add to."""
        if self._update is None:
            self._update = Update()
        return self._update


class StreamTable:
    """All streams of one front end, by request id and by handle. Drops a stream when it ends."""

    def __init__(self) -> None:
        self._by_id: dict[str, Stream] = {}
        self._by_handle: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def streams(self) -> list[Stream]:
        """In order of arrival."""
        return list(self._by_id.values())

    def add(self, request: AddRequest, on_update: Callable[[], None] | None = None) -> Stream:
        """Raises InvalidRequest when its id is in use."""
        if request.request_id in self._by_id:
            raise InvalidRequest("request_id is in use", "request_id", "duplicate_request_id")
        stream = self._by_id[request.request_id] = Stream(request, on_update)
        return stream

    def forget_handles(self) -> None:
        """The scheduler that gave them is gone."""
        for stream in self._by_handle.values():
            stream.handle = None
        self._by_handle.clear()

    def drop(self, stream: Stream) -> None:
        """It is not read any more, and no message will tell of its end."""
        stream.over = True
        del self._by_id[stream.request_id]

    def end_failed(self, stream: Stream, detail: str) -> None:
        """It ends here, whatever the scheduler still says of it."""
        self.drop(stream)
        update = stream.pending()
        update.ended, update.detail = EndReason.ERROR, detail
        stream.notify()

    def apply(self, message: StepOutputs) -> None:
        """Give each stream what the step brought it, and notify it once."""
        for introduced in message.introduced:
            stream = self._by_id[introduced.request_id]
            stream.handle = introduced.handle
            if stream.num_cached_tokens < 0:  # else it is the second time, and may hit what it left itself
                stream.num_cached_tokens = introduced.num_cached_tokens
            self._by_handle[introduced.handle] = stream
        if message.prompt_logprobs is not None:
            for handle, start, part in message.prompt_logprobs.parts():
                self._by_handle[handle].place_prompt_logprobs(start, part)
        touched: dict[int, Stream] = {}
        if message.handles is not None and message.tokens is not None:
            handles = _handle_per_token(message.handles, message.counts)
            touched = self._apply_tokens(handles, message.tokens.tolist())
            if message.logprobs is not None:
                self._apply_logprobs(message.logprobs, handles)
        for ended in message.ended:
            stream = self._by_handle.pop(ended.handle)
            del self._by_id[stream.request_id]
            stream.num_output_tokens = ended.num_output_tokens
            update = stream.pending()
            update.ended = EndReason(ended.reason)
            update.stop_reason, update.detail = ended.stop_reason, ended.detail
            stream.over = True
            touched[ended.handle] = stream
        for stream in touched.values():
            stream.notify()

    def reject(self, message: Rejected) -> None:
        """The scheduler did not accept a request."""
        stream = self._by_id.pop(message.request_id, None)
        if stream is not None:
            self._end_with(stream, InvalidRequest(message.message, message.param or None, message.code))

    def fail(self, reason: str) -> None:
        """The engine is gone: nothing in flight will go on."""
        streams = list(self._by_id.values())
        self._by_id.clear()
        self._by_handle.clear()
        for stream in streams:
            self._end_with(stream, EngineError(reason))

    @staticmethod
    def _end_with(stream: Stream, error: QuireError) -> None:
        stream.error = error
        stream.over = True
        stream.notify()

    def _apply_tokens(self, handles: list[int], tokens: list[int]) -> dict[int, Stream]:
        touched: dict[int, Stream] = {}
        for handle, token in zip(handles, tokens, strict=True):
            stream = self._by_handle[handle]
            if not stream.muted:
                stream.num_output_tokens += 1
                stream.tokens.append(token)
                stream.pending().token_ids.append(token)
            touched[handle] = stream
        return touched

    def _apply_logprobs(self, told: Logprobs, handles: list[int]) -> None:
        for row, entry in zip(told.rows, told.arrays.entries(), strict=True):
            stream = self._by_handle[handles[row]]
            if stream.muted:
                continue
            update = stream.pending()
            if update.logprobs is None:
                update.logprobs = []
            update.logprobs.append(entry)


def _handle_per_token(handles: Int32, counts: Int32 | None) -> list[int]:
    """The handle of each token: a request with accepted drafts gets several."""
    per_token: list[int] = (handles if counts is None else np.repeat(handles, counts)).tolist()
    return per_token
