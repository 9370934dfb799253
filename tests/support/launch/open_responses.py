"""What the Open Responses specification requires of responses and events, as far as this server writes them."""

from typing import Any, Literal

import msgspec

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


Part = OutputText | ReasoningText


class MessageItem(msgspec.Struct, tag="message"):
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[Part]
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(msgspec.Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningItem(msgspec.Struct, tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[Part] = []


class CompactionItem(msgspec.Struct, tag="compaction"):
    id: str
    encrypted_content: str


Item = MessageItem | CallItem | ReasoningItem | CompactionItem


class Tool(msgspec.Struct, tag_field="type", tag="function"):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class Failure(msgspec.Struct):
    code: str
    message: str


class Response(msgspec.Struct):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    incomplete_details: dict[str, str] | None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: list[Item]
    error: Failure | None
    tools: list[Tool]
    tool_choice: Any
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: dict[str, Any]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: dict[str, Any] | None
    usage: Usage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: Any
    safety_identifier: str | None
    prompt_cache_key: str | None


class Compaction(msgspec.Struct):
    id: str
    object: Literal["response.compaction"]
    output: list[Item]
    created_at: int
    usage: Usage


class _Event(msgspec.Struct):
    sequence_number: int


class _OfItem(_Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int


class _OfResponse(_Event, kw_only=True):
    response: Response


class Created(_OfResponse, tag="response.created"): ...


class InProgress(_OfResponse, tag="response.in_progress"): ...


class Completed(_OfResponse, tag="response.completed"): ...


class Incomplete(_OfResponse, tag="response.incomplete"): ...


class Failed(_OfResponse, tag="response.failed"): ...


class ItemAdded(_Event, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: Item


class ItemDone(_Event, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: Item


class PartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    part: Part


class PartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    part: Part


class TextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[Any] = []


class TextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[Any] = []


class ArgumentsDelta(_OfItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_OfItem, tag="response.function_call_arguments.done", kw_only=True):
    arguments: str


class ErrorFields(msgspec.Struct):
    type: str
    code: str
    message: str
    param: str | None


class Error(_Event, tag="error", kw_only=True):
    """``status``: over web sockets only."""

    error: ErrorFields
    status: int | None = None


TextEvent = PartAdded | PartDone | TextDelta | TextDone | ArgumentsDelta | ArgumentsDone
Event = Created | InProgress | Completed | Incomplete | Failed | ItemAdded | ItemDone | TextEvent | Error
Last = Completed | Incomplete | Failed | Error


def read_response(data: Any) -> Response:
    return msgspec.convert(data, Response)


def read_events(datas: list[Any]) -> list[Event]:
    """Check each event by itself, and that only the last one ends the response."""
    events = [msgspec.convert(data, Event) for data in datas]
    assert isinstance(events[-1], Last)
    assert not any(isinstance(event, Last) for event in events[:-1])
    return events
