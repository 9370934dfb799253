"""Texts so long that they take a while, many at once: others' prompts do not stand in line behind them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from front_end import EndlessEngine
from tokenizers import Tokenizer, models

from quire.launch.http.app import make_app
from quire.launch.http.serving.lanes import MAX_LONG_CHARS, NUM_HUGE_TEXTS, NUM_LONG_TEXTS, TextLanes
from quire.launch.http.serving.server import ServerSettings
from quire.launch.text.text_in import LONG_TEXT_CHARS, TextIn

WAIT_S = 30.0
HUGE = MAX_LONG_CHARS + 1


class Stuck(TextIn):
    """Takes as long for huge texts as a test likes; every text is one token, so that only waiting takes time."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(models.BPE({"a": 0}, [])))
        self.goes_on = threading.Event()
        self.most = self._now = 0
        self._lock = threading.Lock()

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) < MAX_LONG_CHARS:
            return [0]
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        assert self.goes_on.wait(WAIT_S)
        with self._lock:
            self._now -= 1
        return [0]


def ask(client: httpx.AsyncClient, route: str, size: int) -> Any:
    fields = {"max_tokens": 1} if "completions" in route else {}
    return asyncio.create_task(client.post(route, json={"prompt": "a" * size, **fields}))


@pytest.mark.parametrize("size", [1, LONG_TEXT_CHARS + 1, MAX_LONG_CHARS - 1000])
@pytest.mark.parametrize("route", ["/tokenize", "/v1/completions"])
def test_huge_prompts_hold_up_no_other(route: str, size: int) -> None:
    text_in = Stuck()
    app = make_app(EndlessEngine(), ServerSettings(text_in=text_in, served_model_names=("m",)))

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=WAIT_S) as client:
            flood = [ask(client, path, HUGE) for path in ("/tokenize", "/v1/completions") for _ in range(32)]
            while text_in.most < NUM_HUGE_TEXTS:
                await asyncio.sleep(0.001)
            for answer in await asyncio.gather(*(ask(client, route, size) for _ in range(8))):
                assert answer.status_code == 200, answer.text
            assert not any(task.done() for task in flood)
            text_in.goes_on.set()
            assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}

    try:
        asyncio.run(run())
    finally:
        text_in.goes_on.set()
    assert text_in.most == NUM_HUGE_TEXTS


@pytest.mark.parametrize(
    ("num_chars", "at_once"),
    [(LONG_TEXT_CHARS + 1, NUM_LONG_TEXTS), (MAX_LONG_CHARS, NUM_LONG_TEXTS), (HUGE, NUM_HUGE_TEXTS)],
)
def test_so_many_at_once_and_no_more(num_chars: int, at_once: int) -> None:
    barrier, names = threading.Barrier(at_once), set()

    def work() -> None:
        names.add(threading.current_thread().name)
        barrier.wait(WAIT_S)

    assert threading.main_thread().name not in in_lanes(num_chars, work, 3 * at_once, names)
    assert len(names) == at_once


def test_a_short_one_is_not_handed_over() -> None:
    names: set[str] = set()
    in_lanes(LONG_TEXT_CHARS, lambda: names.add(threading.current_thread().name), 3, names)
    assert names == {threading.main_thread().name}


def in_lanes(num_chars: int, work: Callable[[], None], times: int, names: set[str]) -> set[str]:
    async def run() -> None:
        lanes = TextLanes()
        await asyncio.gather(*(lanes.run(num_chars, work) for _ in range(times)))

    asyncio.run(run())
    return names
