"""Streams whose events are encoded by templates and written directly to their connections."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from front_end import FrontEnd
from hypothesis import example, given
from hypothesis import strategies as st

from quire.frontend.engine.scheduler_link import Readers
from quire.frontend.http.routes.chat import ChatChunk, ChunkChoice, Delta
from quire.frontend.http.routes.formatter import PromptTokens, Usage
from quire.frontend.http.routes.text_template import TextTemplate
from quire.frontend.http.serving.outbox import ChunkWriter, Outbox

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


@given(TEXTS, TEXTS, st.sampled_from([None, Usage(1, 2, 3, PromptTokens(0))]))
@example('"TEXT"', '{"content":"TEXT"}', None)
@example('\u2028\x00\x1f\x7f"\\/😀', "TEXT", None)
def test_template_equals_the_encoder(text: str, model: str, usage: Usage | None) -> None:
    def encode(content: str) -> bytes:
        choices = [ChunkChoice(0, Delta(content))]
        return msgspec.json.encode(ChatChunk("chatcmpl-TEXT", "chat.completion.chunk", 1, model, choices, usage))

    assert TextTemplate(encode).fill(text) == encode(text)


class Transport:
    """Records what is written. ``is_closing`` as in asyncio."""

    def __init__(self, written: list[bytes], *, closing: bool = False) -> None:
        self._written = written
        self._closing = closing

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self._written.append(data)


def test_parts_of_one_turn_are_written_in_order_and_not_to_closed_connections() -> None:
    written: list[bytes] = []
    outbox = Outbox()
    first, closed, last = (
        ChunkWriter(Transport(written, closing=each == 1), outbox)  # type: ignore[arg-type]
        for each in range(3)
    )

    async def run() -> None:
        first.write(b"one")
        closed.write(b"lost")
        last.write(b"two")
        assert written == []
        await asyncio.sleep(0)
        assert written == [b"3\r\none\r\n", b"3\r\ntwo\r\n"]
        last.write(b"three")
        last.flush()
        assert written[2:] == [b"5\r\nthree\r\n"]
        await asyncio.sleep(0)

    asyncio.run(run())
    assert len(written) == 3


def test_a_reader_is_called_once_for_all_its_sequences() -> None:
    calls: list[str] = []

    async def run() -> None:
        readers = Readers()
        for name in "abba":
            readers.call_later({"a": one, "b": other}[name])
        assert calls == []
        await asyncio.sleep(0)

    def one() -> None:
        calls.append("a")

    def other() -> None:
        calls.append("b")

    asyncio.run(run())
    assert calls == ["a", "b"]


@pytest.fixture(scope="module")
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd()
    yield made
    made.check()
    made.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 30])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 1, "n": 3}])
def test_events_arrive_in_order(front_end: FrontEnd, fields: dict[str, Any], max_tokens: int) -> None:
    """Log probabilities of the prompt are formatted in a thread, while further tokens arrive."""
    body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, **fields}
    text = front_end.client.post("/v1/completions", json=body).text
    *events, done, empty = [block.removeprefix("data: ") for block in text.split("\n\n")]
    assert (done, empty) == ("[DONE]", "")
    for index in range(body.get("n", 1)):
        choices = [choice for event in events for choice in json.loads(event)["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        if "logprobs" in fields:
            tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
            assert tokens == [f"token_id:{token}" for token in (5, 6, 7, *range(18, 18 + max_tokens))]
