"""A small tokenizer, a fake engine, and a client for the application over them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.text_in import TextIn

TEMPLATE = (
    "{%- if messages[0].role == 'tool' %}{{ raise_exception('a tool cannot begin') }}{% endif %}"
    "{% if tools and not bare %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>' + '\\n' }}{% endif %}"
    "{% if bare %}{{ messages[-1].content }}{% else %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{% endif %}"
)
CORPUS = [
    "Once upon a time there was a little engine that could serve tokens. The end.",
    "one two three four five six seven eight nine ten",
    "hello world, how are you today? I am fine, thank you.",
    "你好，世界。 Grüße aus Köln! 😀👩‍👩‍👧 naïve café",
] * 4


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE with all bytes, three special tokens, and no beginning-of-text token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


@pytest.fixture(scope="session")
def text_in(tokenizer: Tokenizer) -> TextIn:
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return TextIn(tokenizer, ChatTemplate(TEMPLATE, special, "test"))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, reply="one two three four five")


@pytest.fixture
def app(engine: FakeEngine, text_in: TextIn) -> Starlette:
    return make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny", "alias")))


@dataclass
class Client:
    """Synchronous calls into an application, without sockets."""

    app: Starlette

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, **({"json": body} if body is not None else {}), **kwargs)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        message = {"role": "user", "content": "hello"}
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": [message], **fields})


@pytest.fixture
def client(app: Starlette) -> Client:
    return Client(app)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; the end mark as a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    datas = [block.removeprefix("data: ") for block in blocks]
    return ["[DONE]" if data == "[DONE]" else json.loads(data) for data in datas]


@pytest.fixture(name="events")
def events_fixture() -> Callable[[httpx.Response], list[Any]]:
    return events


@dataclass
class Connection:
    """One request sent to an application without a client library, so that a test can disconnect at any time."""

    app: Starlette
    path: str
    body: bytes
    sent: list[Any] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    _given: bool = False

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": [],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def connect(app: Starlette) -> Callable[[str, Any], Connection]:
    return lambda path, body: Connection(app, path, json.dumps(body).encode())


@pytest.fixture
def finish() -> Callable[[Awaitable[None]], None]:
    """Run a coroutine with a deadline, so that a hang is a failure."""

    def run(work: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(10):
                await work

        asyncio.run(bounded())

    return run
