"""Coding agents' conversations: one per line, with think times, sub-agents, and chained ids of full blocks.

A conversation's numbers name contents of its own (the publisher's ids are local), sub-agents' included.
"""

from array import array
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from quire.launch.replay.formats.content import tell_answers
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import (
    AnswerLength,
    Faults,
    PromptLength,
    Seconds,
    at_least_one_token,
    empty_notes,
    files_of,
    finish,
    records,
)
from quire.launch.replay.workload import Call, Content, Workload


class _Request(msgspec.Struct, tag_field="type"):
    """``t``: seconds from the start of the conversation, or of the sub-agent; ``api_time``: what the answer took."""

    t: Seconds
    num_prompt_tokens: PromptLength = msgspec.field(name="in")
    num_output_tokens: AnswerLength = msgspec.field(name="out")
    hash_ids: list[int]
    stop: str | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class _Normal(_Request, tag="n"):
    pass


class _Streamed(_Request, tag="s"):
    pass


class _SubAgent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    requests: list[_Normal | _Streamed]


_Entry: TypeAlias = _Normal | _Streamed | _SubAgent


class _Conversation(msgspec.Struct):
    id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    requests: list[_Entry]


class _Bad(Exception):
    """Why a conversation cannot be used."""


def load(path: Path, options: LoadOptions) -> Workload:
    """Conversation k, from 0, starts at ``stagger * k`` seconds.

    Raises:
        ConfigError: a line is bad (lenient: the whole conversation is left out).
    """
    faults = Faults(options.lenient)
    workload = Workload("agentic", str(path), [])
    reader = _Reader(options)
    space = 0
    for file in files_of(path):
        for number, conversation in records(file, _Conversation, faults):
            try:
                workload.calls += reader.read(conversation, space, len(workload.calls))
            except _Bad as error:
                faults.add(file, number, str(error))
                continue
            space += 1
    workload.notes += reader.notes()
    return finish(workload, options, faults)


class _Reader:
    """Turns conversations into calls; numbers them as they stand in the file."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._empty = [0]
        self._labels: dict[str, int] = {}
        self._num_subagents = 0

    def read(self, conversation: _Conversation, space: int, first: int) -> list[Call]:
        """Raises: _Bad: a request's ids or times are wrong."""
        start, label = self._options.stagger * space, self._label(conversation.id)
        calls: list[Call] = []
        main: list[Call] = []
        ends: dict[int, float] = {}  # when the recorded answers ended
        joined: Call | None = None
        for place, entry in enumerate(conversation.requests):
            if isinstance(entry, _SubAgent):
                self._num_subagents += 1
                turns: list[Call] = []
                for index, request in enumerate(entry.requests):
                    call = self._call(first + len(calls), f"{label}/{place}.{index}", request, conversation, space)
                    call.arrival = start + entry.t + request.t
                    self._follow(call, request, turns[-1] if turns else main[-1] if main else None, ends, bool(turns))
                    turns.append(call)
                    calls.append(call)
                tell_answers(turns)
                if turns and (joined is None or ends[turns[-1].number] > ends[joined.number]):
                    joined = turns[-1]
                continue
            call = self._call(first + len(calls), f"{label}/{place}", entry, conversation, space)
            call.arrival = start + entry.t
            waits_for = joined if self._options.join_subagents else None
            joined = None
            self._follow(call, entry, waits_for or (main[-1] if main else None), ends, waits_for is None)
            main.append(call)
            calls.append(call)
        tell_answers(main)
        return calls

    def notes(self) -> list[str]:
        notes = empty_notes(self._empty)
        if self._num_subagents:
            waits = "waits for the last of them" if self._options.join_subagents else "does not wait for them"
            notes.append(f"{self._num_subagents} sub-agents: in a closed loop the conversation {waits}")
        notes.append(
            f"conversations start {self._options.stagger:g} s apart and share no prefix with each other; the trace "
            "does not show what system prompt they have in common"
        )
        return notes

    def _label(self, name: str) -> str:
        count = self._labels[name] = self._labels.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def _call(self, number: int, request_id: str, request: _Request, conversation: _Conversation, space: int) -> Call:
        expected = request.num_prompt_tokens // conversation.block_size
        if len(request.hash_ids) != expected:
            raise _Bad(
                f"request {request_id}: `hash_ids` has {len(request.hash_ids)} entries; "
                f"{request.num_prompt_tokens} tokens make {expected} full blocks"
            )
        try:
            ids = array("Q", request.hash_ids)
        except OverflowError:
            raise _Bad(f"request {request_id}: `hash_ids` must be from 0 to 2**64 - 1") from None
        return Call(
            number,
            request_id,
            0.0,
            request.num_prompt_tokens,
            at_least_one_token(request.num_output_tokens, self._empty),
            Content(ids, conversation.block_size, space),
            request_id.rpartition("/")[0],
            is_last_step=request.stop != "tool_use",
        )

    def _follow(
        self, call: Call, request: _Request, before: Call | None, ends: dict[int, float], takes_think_time: bool
    ) -> None:
        """``takes_think_time``: the recorded one is from ``before``'s end, and not from another's."""
        ends[call.number] = call.arrival + (request.api_time or 0.0)
        if before is None:
            return
        if call.arrival < before.arrival and takes_think_time:
            raise _Bad(f"request {call.request_id}: `t` {request.t:g} is less than that of the request before it")
        call.after = before.number
        if takes_think_time and request.think_time is not None:
            call.pause = request.think_time
        else:
            call.pause = max(0.0, call.arrival - ends[before.number])
