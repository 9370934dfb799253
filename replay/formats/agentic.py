"""Conversations of coding agents, one per line, with think times, sub-agents, and chained ids of full blocks.

Ids are local to a conversation and its sub-agents: equal ids of two conversations are different contents.
"""

from array import array
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from quire.replay.formats.content import set_answers
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import AnswerLength, Faults, PromptLength, Seconds, files_of, finish, records
from quire.replay.workload.workload import Call, ContentIds, Workload


class _Request(msgspec.Struct, tag_field="type"):
    """A request; ``t``: seconds from the start of the conversation or sub-agent; ``api_time``: its latency."""

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
    """An invalid conversation, with the reason."""


def load(path: Path, options: LoadOptions) -> Workload:
    """Load a trace. Conversation k, from 0, starts at ``stagger * k`` seconds.

    Raises:
        ConfigError: a bad line (lenient: the whole conversation is skipped).
    """
    faults = Faults(options.lenient)
    workload = Workload("agentic", str(path), [])
    labels: dict[str, int] = {}
    space = num_subagents = 0
    for file in files_of(path):
        for number, conversation in records(file, _Conversation, faults):
            builder = _Builder(conversation, _label(conversation.id, labels), space, len(workload.calls), options)
            try:
                workload.calls += builder.build()
            except _Bad as error:
                faults.add(file, number, str(error))
                continue
            space += 1
            num_subagents += builder.num_subagents
            faults.empty["answer"] += builder.num_empty
    if num_subagents:
        waits = "waits for the last of them" if options.join_subagents else "does not wait for them"
        workload.notes.append(f"{num_subagents} sub-agents: in a closed loop the conversation {waits}")
    workload.notes.append(
        f"conversations start {options.stagger:g} s apart and share no prefix with each other: the trace does not "
        "identify common system prompts"
    )
    return finish(workload, options, faults)


def _label(name: str, labels: dict[str, int]) -> str:
    """Return a unique label for a conversation; names may repeat."""
    count = labels[name] = labels.get(name, 0) + 1
    return name if count == 1 else f"{name}#{count}"


class _Builder:
    """Builds the calls of one conversation, numbered from ``first`` in file order."""

    def __init__(self, conversation: _Conversation, label: str, space: int, first: int, options: LoadOptions) -> None:
        self.num_subagents = self.num_empty = 0
        self._conversation = conversation
        self._label = label
        self._space = space
        self._first = first
        self._start = options.stagger * space
        self._joins = options.join_subagents
        self._calls: list[Call] = []
        self._main: list[Call] = []
        self._ends: dict[int, float] = {}  # end of each recorded answer by call number
        self._joined: Call | None = None  # last call of the sub-agents since the last main request

    def build(self) -> list[Call]:
        """Build the calls. Raises _Bad if a request's ids or times are invalid."""
        for place, entry in enumerate(self._conversation.requests):
            if isinstance(entry, _SubAgent):
                self._add_subagent(place, entry)
            else:
                self._add_main(place, entry)
        set_answers(self._main)
        return self._calls

    def _add_main(self, place: int, request: _Request) -> None:
        call = self._add(f"{place}", request, 0.0)
        if self._joins and self._joined is not None:
            self._follow(call, self._joined, None)
        elif self._main:
            self._follow(call, self._main[-1], request)
        self._joined = None
        self._main.append(call)

    def _add_subagent(self, place: int, entry: _SubAgent) -> None:
        """Add a sub-agent's calls; the first follows the preceding main request, with a recorded think time of 0."""
        self.num_subagents += 1
        turns: list[Call] = []
        for index, request in enumerate(entry.requests):
            call = self._add(f"{place}.{index}", request, entry.t)
            call.agent = f"{place}"
            if turns:
                self._follow(call, turns[-1], request)
            elif self._main:
                self._follow(call, self._main[-1], None)
            turns.append(call)
        set_answers(turns)
        if turns and (self._joined is None or self._ends[turns[-1].number] > self._ends[self._joined.number]):
            self._joined = turns[-1]

    def _add(self, name: str, request: _Request, start: float) -> Call:
        unit = self._conversation.block_size
        expected = request.num_prompt_tokens // unit
        if len(request.hash_ids) != expected:
            raise _Bad(
                f"request {name}: `hash_ids` has {len(request.hash_ids)} entries; "
                f"{request.num_prompt_tokens} tokens have {expected} full blocks"
            )
        try:
            ids = array("Q", request.hash_ids)
        except OverflowError:
            raise _Bad(f"request {name}: `hash_ids` must be between 0 and 2**64 - 1") from None
        call = Call(
            self._first + len(self._calls),
            f"{self._label}/{name}",
            self._start + start + request.t,
            request.num_prompt_tokens,
            request.num_output_tokens or 1,
            ContentIds(ids, unit, self._space),
            self._label,
            is_last_step=request.stop != "tool_use",
            tool="tool_use" if request.stop == "tool_use" else "",
        )
        self.num_empty += not request.num_output_tokens
        self._ends[call.number] = call.arrival + (request.api_time or 0.0)
        self._calls.append(call)
        return call

    def _follow(self, call: Call, before: Call, request: _Request | None) -> None:
        """Let ``call`` follow ``before`` in a closed loop.

        With ``request``, the pause is its think time, and ``call`` must not precede ``before``.
        """
        if request is not None and call.arrival < before.arrival:
            raise _Bad(f"request {call.request_id}: `t` {request.t:g} is less than that of the request before it")
        call.after = before.number
        if request is not None and request.think_time is not None:
            call.pause = request.think_time
        else:
            call.pause = max(0.0, call.arrival - self._ends[before.number])
