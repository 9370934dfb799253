"""A small tokenizer, an engine that invents its tokens, and a client for the application around them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.launch.frontend.engine_client import Update
from quire.launch.http.app import make_app
from quire.launch.http.serving.server import ServerSettings
from quire.launch.text.chat_template import ChatTemplate
from quire.launch.text.text_in import TextIn
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason, Statistics
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs

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
    """A byte-level BPE that has every byte, three special tokens, and no beginning-of-text."""
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


@dataclass
class FakeSequence:
    """Delivers its tokens ``per_update`` at a time; waits for ever after ``hang_after`` of them."""

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
    delivered: int = 0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def updates(self) -> AsyncIterator[Update]:
        if self.delivered == 0 and isinstance(self.ending, InvalidRequest):
            raise self.ending
        tokens = self.tokens[: self.params.max_tokens]
        for begin in range(0, len(tokens), self.per_update):
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
        wanted = self.params.logprobs
        return Update(
            token_ids=part,
            logprobs=None if wanted is None else [fake_logprobs(token, wanted) for token in part],
            ended=ended,
            num_output_tokens=self.delivered,
            num_cached_tokens=len(self.prompt) // 2,
            detail=self.detail if ended is EndReason.ERROR else "",
            prompt_logprobs=self._prompt_logprobs() if self.delivered == len(part) else None,
        )

    def _prompt_logprobs(self) -> LogprobArrays | None:
        """As the engine gives them: of all tokens but the first, and nothing of a prompt of one token."""
        if self.params.prompt_logprobs is None or len(self.prompt) == 1:
            return None
        return fake_prompt_logprobs(self.prompt)

    def stop_at(self, num_output_tokens: int) -> None:
        self.stopped_at = num_output_tokens

    def abort(self) -> None:
        self.aborted = True
        self.on_abort()


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, [(token, -0.5), (5, -2.0), (6, float("-inf"))][:count])


def fake_prompt_logprobs(prompt: list[int]) -> LogprobArrays:
    """Token ``i`` has -i and rank i + 1; the best are 5 and 6 of -0.25 and -inf."""
    num_tokens = len(prompt) - 1
    ids = np.array([[token, 5, 6] for token in prompt[1:]], np.int32)
    values = np.array([[-float(i), -0.25, -np.inf] for i in range(1, num_tokens + 1)], np.float32)
    return LogprobArrays.of(ids, values, np.arange(2, num_tokens + 2, dtype=np.int32))


@dataclass
class FakeEngine:
    """Answers every prompt with ``reply``, or with tokens that depend on the seed alone."""

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
    seconds_without_progress: float = 0.0
    max_model_len: int = 256
    vocab_size: int = 420
    added: list[FakeSequence] = field(default_factory=list)
    priorities: list[tuple[int, str]] = field(default_factory=list)
    figures: Statistics = field(
        default_factory=lambda: Statistics(
            query=1, num_running=3, num_waiting=2, num_usable_blocks=100, num_free_blocks=75, prefix_cache_hit_tokens=16
        )
    )

    async def add(
        self,
        request_id: str,
        prompt_token_ids: Any,
        params: SamplingParams,
        seed: int,
        priority: int,
        cache_salt: str,
        tenant: int,
    ) -> FakeSequence:
        if self.refuse is not None:
            raise self.refuse
        assert params.n == 1
        assert params.stop == params.bad_words == []
        assert params.max_tokens is not None
        prompt = np.asarray(prompt_token_ids, dtype=np.int32).tolist()
        assert len(prompt) + params.max_tokens <= self.max_model_len
        sequence = FakeSequence(
            request_id,
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
        self.added.append(sequence)
        self.priorities.append((priority, cache_salt))
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
    """The events of a stream, the end mark as a string."""
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
    """One request given to an application by hand, so that its client can leave when a test wants."""

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
    """Run a coroutine to its end with a deadline, so that a hang is a failure."""

    def run(work: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(10):
                await work

        asyncio.run(bounded())

    return run
