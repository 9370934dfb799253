"""Many long texts at the same time: prompts of other clients do not wait for them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from front_end import EndlessEngine
from tokenizers import Tokenizer, models

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.http.serving.work_threads import (
    MAX_LONG_CHARS,
    NUM_HUGE_TEXTS,
    NUM_LONG_TEXTS,
    ConversationThreads,
    TextThreads,
)
from quire.frontend.text.text_in import LONG_TEXT_CHARS, ChatOptions, TextIn

WAIT_S = 30.0
HUGE = MAX_LONG_CHARS + 1


class BlockedTextIn(TextIn):
    """Encoding of huge texts blocks until ``unblock`` is set. Every text is one token."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(models.BPE({"a": 0}, [])))
        self.unblock = threading.Event()
        self.max_concurrent = self._concurrent = 0
        self._lock = threading.Lock()

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) < MAX_LONG_CHARS:
            return [0]
        with self._lock:
            self._concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self._concurrent)
        assert self.unblock.wait(WAIT_S)
        with self._lock:
            self._concurrent -= 1
        return [0]


def ask(client: httpx.AsyncClient, route: str, size: int) -> Any:
    fields = {"max_tokens": 1} if "completions" in route else {}
    return asyncio.create_task(client.post(route, json={"prompt": "a" * size, **fields}))


@pytest.mark.parametrize("size", [1, LONG_TEXT_CHARS + 1, MAX_LONG_CHARS - 1000])
@pytest.mark.parametrize("route", ["/tokenize", "/v1/completions"])
def test_huge_prompts_do_not_delay_others(route: str, size: int) -> None:
    text_in = BlockedTextIn()
    app = make_app(EndlessEngine(), ServerSettings(text_in=text_in, served_model_names=("m",)))

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=WAIT_S) as client:
            flood = [ask(client, path, HUGE) for path in ("/tokenize", "/v1/completions") for _ in range(32)]
            while text_in.max_concurrent < NUM_HUGE_TEXTS:
                await asyncio.sleep(0.001)
            for answer in await asyncio.gather(*(ask(client, route, size) for _ in range(8))):
                assert answer.status_code == 200, answer.text
            assert not any(task.done() for task in flood)
            text_in.unblock.set()
            assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}

    try:
        asyncio.run(run())
    finally:
        text_in.unblock.set()
    assert text_in.max_concurrent == NUM_HUGE_TEXTS


@pytest.mark.parametrize(
    ("num_chars", "num_threads"),
    [(LONG_TEXT_CHARS + 1, NUM_LONG_TEXTS), (MAX_LONG_CHARS, NUM_LONG_TEXTS), (HUGE, NUM_HUGE_TEXTS)],
)
def test_number_of_threads_per_lane(num_chars: int, num_threads: int) -> None:
    barrier, names = threading.Barrier(num_threads), set()

    def work() -> None:
        names.add(threading.current_thread().name)
        barrier.wait(WAIT_S)

    assert threading.main_thread().name not in in_lanes(num_chars, work, 3 * num_threads, names)
    assert len(names) == num_threads


def test_short_text_runs_on_the_event_loop() -> None:
    names: set[str] = set()
    in_lanes(LONG_TEXT_CHARS, lambda: names.add(threading.current_thread().name), 3, names)
    assert names == {threading.main_thread().name}


def test_short_text_of_a_slow_tokenizer_runs_in_a_thread() -> None:
    names: set[str] = set()
    in_lanes(1, lambda: names.add(threading.current_thread().name), 3, names, is_slow=True)
    assert names and threading.main_thread().name not in names


def in_lanes(
    num_chars: int, work: Callable[[], None], times: int, names: set[str], *, is_slow: bool = False
) -> set[str]:
    async def run() -> None:
        text_in = TextIn()
        text_in.is_slow = is_slow
        lanes = TextThreads(text_in)
        await asyncio.gather(*(lanes.run(num_chars, work) for _ in range(times)))

    asyncio.run(run())
    return names


def test_long_conversations_do_not_delay_short_ones_with_template_variables() -> None:
    lanes, unblock = ConversationThreads(TextIn()), threading.Event()

    async def run() -> list[str]:
        options = (ChatOptions(), ChatOptions(variables={"x": 1}))
        long = [asyncio.ensure_future(lanes.run(2**20, each, lambda: unblock.wait())) for each in options * 6]
        ended = [await lanes.run(100, each, lambda: "short") for each in options]
        unblock.set()
        await asyncio.gather(*long)
        return ended

    assert asyncio.run(run()) == ["short", "short"]
