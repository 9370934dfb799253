"""The front end's table of answers in flight and their unread tokens. No I/O.

Both clients use it: the asynchronous one (HTTP) and the blocking one (offline API).
"""

from array import array
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import numpy as np

from quire.frontend.engine.new_rows import NewRows
from quire.frontend.engine.update import Update
from quire.protocol.errors import EngineError, InvalidRequest, QuireError
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.front_end_messages import AddRequest, EndReason, Rejected, StepOutputs
from quire.protocol.wire.side_rows import SIDE_KINDS, Rows, RowsOf, SideKind, SideRows
from quire.protocol.wire.timeline import TimelineEvent


class StreamOwner(Protocol):
    """What ends a stream: the session of one engine, or all engines."""

    def stop_at(self, stream: "Stream", num_output_tokens: int) -> None: ...

    def abort(self, stream: "Stream") -> None: ...

    def calls_tool(self, stream: "Stream", tool: str) -> None: ...


class Stream:
    """One answer in flight: its request, all tokens received, and the unread update.

    Attributes:
        request: the request as first submitted, unless that is a fork.
        parent: the stream whose first tokens it shares, until it is submitted.
        timeline: what happened to it so far; None if its client has not asked for that.
        tokens: output tokens so far, int32: those that the request has from the start, which are its first update, and
            those received. They are sent to the next scheduler if this one dies.
        link_number: the session's link on which it was last submitted; 0 before the first submission.
        on_update: notifies the reader of an update or an error.
        on_over: called once, when it is over.
        handle: the scheduler's handle of the request; None before the first message about it.
        error: set instead of an end, if the request was refused or the engine failed.
        engines: with several engines, those that have had it and why, such as ``2 cached, 0 load``; otherwise empty.
        muted: the stream is no longer read; further tokens are dropped.
        over: no further message about it is expected.
    """

    __slots__ = (
        "_num_deaths", "_num_taken", "_num_tokens_at_death", "_owner", "_side", "_update", "admitted", "engines",
        "error", "handle", "link_number", "muted", "num_cached_tokens", "on_over", "on_update", "over", "parent",
        "request", "request_id", "timeline", "tokens", "was_introduced",
    )  # fmt: skip

    def __init__(
        self,
        request: AddRequest,
        on_update: Callable[[], None] | None = None,
        parent: "Stream | None" = None,
        owner: StreamOwner | None = None,
        on_over: "Callable[[Stream], None] | None" = None,
    ) -> None:
        self.request = request
        self.parent = parent
        self.request_id = request.request_id
        known = [] if request.output_token_ids is None else request.output_token_ids.tolist()
        self.tokens = array("i", known)
        self.link_number = 0
        self._num_deaths = self._num_tokens_at_death = 0
        self.on_update, self.on_over = on_update, on_over
        self._owner = owner
        self.handle: int | None = None
        self.num_cached_tokens = 0
        self.engines = ""
        self.was_introduced = False
        self.admitted = 0.0
        self.timeline = [TimelineEvent("queued", request.arrival)] if request.sampling.return_timeline else None
        self.error: QuireError | None = None
        self.muted = False
        self.over = False
        self._num_taken = 0
        self._update: Update | None = None
        """What is unread beside tokens and rows; None if there is nothing."""
        self._side: dict[SideKind, NewRows] | None = None

    @classmethod
    def muted_for(cls, stream: "Stream") -> "Stream":
        """Return a muted stream of the same request on the same link."""
        made = cls(stream.request)
        made.muted, made.link_number = True, stream.link_number
        return made

    def end(self) -> None:
        """Note that it is over."""
        self.over = True
        if self.on_over is not None:
            self.on_over(self)

    def stop_at(self, num_output_tokens: int) -> None:
        """End it with this many tokens, because a stop string was found. The caller reads no further."""
        if self._owner is not None:
            self._owner.stop_at(self, num_output_tokens)

    def abort(self) -> None:
        """Abort it. No effect if it has ended."""
        if self._owner is not None:
            self._owner.abort(self)

    def calls_tool(self, tool: str) -> None:
        """Report that the answer, which has ended, calls this tool: the next turn of its job follows the tool."""
        if self._owner is not None:
            self._owner.calls_tool(self, tool)

    def take(self) -> Update | None:
        """Return the tokens since the last call, or None. The last update has ``ended``.

        Raises:
            InvalidRequest: the scheduler refused the request; only before the first update.
            EngineError: the engine has failed.
        """
        if self.error is not None:
            raise self.error
        update, num_tokens = self._update, len(self.tokens)
        if update is None:
            if num_tokens == self._num_taken:
                return None
            # Nearly all updates are one token, for which no array is copied.
            is_one = num_tokens == self._num_taken + 1
            update = Update([self.tokens[-1]] if is_one else self.tokens[self._num_taken :].tolist())
        else:
            self._update = None
            update.token_ids = self.tokens[self._num_taken :].tolist()
        self._num_taken = num_tokens
        if update.ended is None:
            update.num_output_tokens = num_tokens
        update.num_cached_tokens = self.num_cached_tokens
        update.admitted, update.timeline = self.admitted, self.timeline
        if self._side is not None:
            self._take_rows(update, self._side)
        return update

    def _take_rows(self, update: Update, side: dict[SideKind, NewRows]) -> None:
        for kind, collected in side.items():
            is_due = kind.rows is not RowsOf.POOLED or update.ended is EndReason.STOPPED
            if is_due and (rows := collected.take()) is not None:
                setattr(update, kind.field, kind.value(rows))

    def submission(self, link_number: int) -> AddRequest:
        """Return the request to submit on this link; from the second time on with the output tokens received.

        The first time it is a fork without tokens of its own, if its parent was submitted on this link and has not
        ended.
        """
        parent, self.parent = self.parent, None
        if not self.link_number:
            if parent is None or parent.link_number != link_number or parent.over or parent.muted:
                return self.request
            return msgspec.structs.replace(
                self.request,
                prompt_token_ids=np.zeros(0, np.int32),
                output_token_ids=None,
                items=[],
                forked_from=parent.request_id,
                num_forked_tokens=len(self.request.prompt_token_ids) + len(self.tokens),
            )
        delivered = np.array(self.tokens, np.int32) if self.tokens else None
        return msgspec.structs.replace(self.request, output_token_ids=delivered, resubmitted=True)

    @property
    def num_deaths(self) -> int:
        """Number of scheduler deaths with this request in flight since it last received a token."""
        return self._num_deaths if len(self.tokens) == self._num_tokens_at_death else 0

    def note_death(self) -> None:
        self._num_deaths, self._num_tokens_at_death = self.num_deaths + 1, len(self.tokens)

    def add_rows(self, kind: SideKind, start: int, rows: Rows) -> None:
        """Keep rows, of which the first is row ``start``, for the next update; call it after adding the tokens.

        Pooled rows are for the update that ends the request well; a failed request has none.
        """
        if self.muted:
            return
        if kind.rows is RowsOf.POSITIONS:
            # The last token has no row yet: it may be followed by others that were computed and do not count.
            most = len(self.request.prompt_token_ids) + len(self.tokens) - 1
            rows = [each[: max(most - start, 0)] for each in rows]
        if self._side is None:
            self._side = {}
        if (found := self._side.get(kind)) is None:
            found = self._side[kind] = NewRows(first=int(kind.rows is RowsOf.PROMPT))
        found.add(start, rows)

    def pending(self) -> Update:
        """Return the unread update, for the table to add an ending or hypotheses to."""
        if self._update is None:
            self._update = Update()
        return self._update


def call_now(on_update: Callable[[], None]) -> None:
    on_update()


class StreamTable:
    """All streams in flight of one front end, by request id and by handle."""

    def __init__(self, notify: Callable[[Callable[[], None]], None] = call_now) -> None:
        """``notify``: calls the ``on_update`` of a stream, now or later."""
        self._notify = notify
        self._by_id: dict[str, Stream] = {}
        self._by_handle: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def streams(self) -> list[Stream]:
        """The streams in order of arrival."""
        return list(self._by_id.values())

    def add(self, stream: Stream) -> None:
        """Add a stream; raise InvalidRequest if the request id is in use."""
        if stream.request_id in self._by_id:
            raise InvalidRequest("request_id is in use", "request_id", "duplicate_request_id")
        self._by_id[stream.request_id] = stream

    def remove(self, stream: Stream) -> None:
        """Remove a stream that continues in another table."""
        del self._by_id[stream.request_id]
        if stream.handle is not None:
            del self._by_handle[stream.handle]
            stream.handle = None

    def replace(self, stream: Stream, other: Stream) -> None:
        """Let ``other`` receive what still arrives for a stream that continues in another table."""
        handle = stream.handle
        self.remove(stream)
        self.add(other)
        if handle is not None:
            other.handle, self._by_handle[handle] = handle, other

    def forget_handles(self) -> None:
        """Forget all handles, which belong to the previous link."""
        for stream in self._by_handle.values():
            stream.handle = None
        self._by_handle.clear()

    def drop(self, stream: Stream) -> None:
        """Remove a stream for which no end message is expected."""
        del self._by_id[stream.request_id]
        stream.end()

    def end_failed(self, stream: Stream, detail: str) -> None:
        """End a stream with an error without waiting for the scheduler."""
        self.drop(stream)
        update = stream.pending()
        update.ended, update.detail, update.num_output_tokens = EndReason.ERROR, detail, len(stream.tokens)
        self._wake([stream])

    def apply(self, message: StepOutputs) -> None:
        """Apply a step's outputs to the streams, and notify each affected stream once."""
        # The order matters: all else names streams by the handles that are introduced here.
        for introduced in message.introduced:
            stream = self._by_id[introduced.request_id]
            stream.handle = introduced.handle
            if not stream.was_introduced:  # not after a resubmission, which may hit the request's own blocks
                stream.was_introduced = True
                stream.num_cached_tokens = introduced.num_cached_tokens
                stream.admitted = introduced.admitted
            self._by_handle[introduced.handle] = stream
        for request_id, event in message.timeline:
            if (found_stream := self._by_id.get(request_id)) is not None and found_stream.timeline is not None:
                found_stream.timeline.append(event)  # those of a beam have no stream
        touched: dict[int, Stream] = {}
        if message.handles is not None and message.tokens is not None:
            handles = _handle_per_token(message.handles, message.counts)
            touched = self._apply_tokens(handles, message.tokens.tolist())
        # After the tokens, which bound the positions that rows may be of, and before the endings, which free handles.
        for side in message.side:
            kind = SIDE_KINDS[side.kind]
            if kind.rows is RowsOf.TOKENS:
                self._add_items(kind.field, side)
                continue
            for handle, start, rows in side.parts():
                self._by_handle[handle].add_rows(kind, start, rows)
        for handle, found in message.hypotheses:
            self._by_handle[handle].pending().hypotheses = found
        for ended in message.ended:
            stream = self._by_handle.pop(ended.handle)
            del self._by_id[stream.request_id]
            update = stream.pending()
            update.ended, update.num_output_tokens = EndReason(ended.reason), ended.num_output_tokens
            update.stop_reason, update.detail = ended.stop_reason, ended.detail
            stream.end()
            touched[ended.handle] = stream
        self._wake(touched.values())

    def get(self, request_id: str) -> Stream | None:
        return self._by_id.get(request_id)

    def reject(self, message: Rejected) -> None:
        """End the stream of a request that the scheduler refused."""
        stream = self._by_id.pop(message.request_id, None)
        if stream is not None:
            self._end_with(stream, InvalidRequest(message.message, message.param or None, message.code))

    def fail(self, reason: str) -> None:
        """End all streams with ``reason``: the engine has failed."""
        streams = list(self._by_id.values())
        self._by_id.clear()
        self._by_handle.clear()
        for stream in streams:
            self._end_with(stream, EngineError(reason))

    def _end_with(self, stream: Stream, error: QuireError) -> None:
        stream.error = error
        stream.end()
        self._wake([stream])

    def _wake(self, streams: Iterable[Stream]) -> None:
        """Notify the readers of these streams, which have an update or an error."""
        notify = self._notify
        for stream in streams:
            if stream.on_update is not None and not stream.muted:
                notify(stream.on_update)

    def _apply_tokens(self, handles: list[int], tokens: list[int]) -> dict[int, Stream]:
        touched: dict[int, Stream] = {}
        for handle, token in zip(handles, tokens, strict=True):
            stream = self._by_handle[handle]
            if not stream.muted:
                stream.tokens.append(token)
            touched[handle] = stream
        return touched

    def _add_items(self, field: str, side: SideRows) -> None:
        """Add a value for each token to the unread updates. Called after the tokens were added."""
        handles = side.handles if side.counts == [1] else [h for h, _, count, _ in side.spans for _ in range(count)]
        for handle, item in zip(handles, side.items(), strict=True):
            stream = self._by_handle[handle]
            if not stream.muted:
                found = getattr(stream.pending(), field)
                if found is None:
                    setattr(stream.pending(), field, [item])
                else:
                    found.append(item)


def _handle_per_token(handles: Int32, counts: Int32 | None) -> list[int]:
    """Return the handle of each token. A request with accepted draft tokens has several."""
    per_token: list[int] = (handles if counts is None else np.repeat(handles, counts)).tolist()
    return per_token
