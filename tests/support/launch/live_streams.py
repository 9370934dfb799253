"""Streamed answers as a client receives them, over plain sockets; the port of a socket identifies the client."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from raw_http import Connection, Reply, connected

PROMPTS = (
    "Once upon a time",
    "The little dog ran",
    "Tom and his sister found a box",
    "One day, a girl named Lily",
    "It was a cold night, and the moon",
    "Where is the big red ball? It",
    "A bird sat on the old tree. The bird",
    "The end of the story is",
)
PATTERN = "(red|blue|green)( (cat|dog|bird)){20}"
"""Regular expression of an answer long enough to be interrupted, so that its grammar must survive its workers.
"""
GOOD_ENDINGS = ("stop", "length")


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    delta: Delta | None = None
    logprobs: Any = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    completion_tokens: int = 0


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


EVENTS = msgspec.json.Decoder(Event)


class ChoiceText(msgspec.Struct):
    """One choice of an answer, assembled from its events."""

    text: str = ""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    finish_reason: str | None = None

    def take(self, choice: Choice) -> None:
        self.text += choice.text or (choice.delta.content or "" if choice.delta is not None else "")
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.logprobs and "tokens" in choice.logprobs:
            self.tokens += choice.logprobs["tokens"]
            self.logprobs += choice.logprobs["token_logprobs"]
            self.offsets += choice.logprobs["text_offset"]


@dataclass(slots=True)
class Answer:
    """The result of one request. ``error``: why it is incomplete, or empty.

    Attributes:
        port: the client's port of its connection; 0 before it connects.
    """

    choices: dict[int, ChoiceText] = field(default_factory=dict)
    num_tokens: int = 0
    error: str = ""
    port: int = 0

    def same_as(self, other: "Answer") -> bool:
        return self.choices == other.choices and self.num_tokens == other.num_tokens

    def contradiction(self) -> str:
        """Return an inconsistency within the answer (a missing, repeated or changed token), or an empty string."""
        for choice_text in self.choices.values():
            at = 0
            for token, offset in zip(choice_text.tokens, choice_text.offsets, strict=True):
                if offset != at:
                    return f"a token begins at character {offset}, expected {at}"
                at += len(token)
            if choice_text.tokens and "".join(choice_text.tokens) != choice_text.text:
                return "the tokens differ from the text"
        counted = sum(len(choice_text.tokens) for choice_text in self.choices.values())
        if counted and counted != self.num_tokens:
            return f"{counted} tokens arrived, usage has {self.num_tokens}"
        return ""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request with one right answer, independent of time and of other requests."""

    path: str
    body: Mapping[str, Any]

    def encoded(self) -> bytes:
        body = msgspec.json.encode({**self.body, "stream": True, "stream_options": {"include_usage": True}})
        head = f"POST {self.path} HTTP/1.1\r\nHost: quire\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body


def make_requests(count: int, seed: int, longest: int = 400) -> list[StreamRequest]:
    """Return requests of all kinds in turn: greedy and sampled, with logprobs, penalties, a grammar, several answers,
    chat.

    Args:
        longest: maximum number of tokens of one answer.
    """
    draw = random.Random(seed)
    kinds: Sequence[dict[str, Any]] = (
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.8, "ignore_eos": True},
        {"temperature": 1.0, "ignore_eos": True, "logprobs": 2, "skip_special_tokens": False},
        {"temperature": 0.0, "ignore_eos": True, "logprobs": 1, "skip_special_tokens": False},
        {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "ignore_eos": True},
        {"temperature": 0.7, "n": 2, "ignore_eos": True},
        {"temperature": 0.7, "stop": ["!", "xyz", "and then"]},
        {"temperature": 0.5, "structured_outputs": {"regex": PATTERN}},
        {"temperature": 0.6, "messages": True, "ignore_eos": True},
    )
    requests = []
    for number in range(count):
        kind = dict(kinds[number % len(kinds)])
        prompt = " ".join(draw.choices(PROMPTS, k=draw.randint(1, 6)))
        body = {"max_tokens": draw.randint(longest // 8, longest), "seed": draw.randrange(2**31), **kind}
        if body.pop("messages", False):
            requests.append(
                StreamRequest("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]})
            )
        else:
            requests.append(StreamRequest("/v1/completions", {**body, "prompt": prompt}))
    return requests


async def stream(port: int, request: StreamRequest, on_piece: Callable[[Answer], None] = lambda answer: None) -> Answer:
    """Send a request and receive its whole answer. Server failures do not raise: they are the result.

    ``on_piece`` is called for each part of the answer, with the answer so far.
    """
    answer = Answer()
    async with connected(("127.0.0.1", port)) as connection:
        try:
            answer.error = await _take(connection, request, answer, on_piece)
        except (OSError, EOFError, ValueError) as error:
            answer.error = f"{'cut off' if connection.port else 'no connection'}: {type(error).__name__}"
        answer.port = connection.port
    return answer


async def _take(
    connection: Connection, request: StreamRequest, answer: Answer, on_piece: Callable[[Answer], None]
) -> str:
    """Receive the answer; return why it is incomplete, or an empty string."""
    reply = Reply()
    rest = b""
    async with aclosing(connection.pieces(request.encoded(), reply)) as pieces:
        async for piece in pieces:
            answer.port = connection.port
            if reply.status != 200:
                continue
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    endings = [choice_text.finish_reason for choice_text in answer.choices.values()]
                    return "" if endings and all(e in GOOD_ENDINGS for e in endings) else f"ended with {endings}"
                if error := _take_event(EVENTS.decode(data), answer, on_piece):
                    return error
    if reply.status != 200:
        return f"status {reply.status}: {reply.body.decode(errors='replace')}"
    return "the stream ended without [DONE]"


def _take_event(event: Event, answer: Answer, on_piece: Callable[[Answer], None]) -> str:
    if event.error is not None:
        return f"error event: {event.error}"
    if event.usage is not None:
        answer.num_tokens = event.usage.completion_tokens
    for choice in event.choices:
        answer.choices.setdefault(choice.index, ChoiceText()).take(choice)
    if event.choices:
        on_piece(answer)
    return ""
