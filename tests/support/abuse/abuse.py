"""A running server for tests that attack it, and what must hold for it after any input."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import httpx
from engine_processes import SHARED
from served import Served
from waits import Watch

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
# The limit for the server's own time: waits for a processor, which other tests hold, do not count.
SLOWEST_S = 2.0
MAX_ERROR_BYTES = 4_000
# What no client may read: our paths and addresses, and messages of Python and of the libraries that we use.
INTERNALS = re.compile(
    r"Traceback|\bFile \"|site-packages|\.py\b|/(?:tmp|work|home|root|usr|proc|dev|run)/|ipc://|127\.0\.0\.1|\bpsm_"
    r"|0x[0-9a-f]{6,}|object at |<class|\w(?:Error|Exception|Refusal)\b|NoneType|\bstack\b"
    r"|index out of range|\bf64\b|\bline \d+ column \d|retriever|malformed|\bpanic"
    r"|msgspec|msgpack|tokenizers|jinja|starlette|uvicorn|httptools|pyzmq|\bzmq|torch|numpy|llguidance|xgrammar|ctypes",
    re.IGNORECASE,
)
# What the log may not contain: signs of an unexpected failure.
ACCIDENTS = re.compile(r"Traceback|unexpected error|never awaited|exception was never retrieved|Task was destroyed")


class Door:
    """The target of an attack: a server, or its application without the processes."""

    def request(self, method: str, path: str, **given: Any) -> httpx.Response:
        raise NotImplementedError

    def in_time(self) -> AbstractContextManager[None]:
        """Context manager that fails if the block takes longer than SLOWEST_S of the server's own time."""
        raise NotImplementedError

    def post(self, path: str, body: Any = None, *, content: bytes | None = None, **more: Any) -> httpx.Response:
        """POST a JSON value or raw bytes. The answer must arrive in time, and an error must not contain internals."""
        given: dict[str, Any] = {"json": body} if content is None else {"content": content}
        with self.in_time():
            response = self.request("POST", path, **given, **more)
        if response.status_code >= 400:
            check_error(response)
        return response

    def complete(self, **fields: Any) -> httpx.Response:
        """POST a completion of four tokens; ``fields`` override the body."""
        return self.post(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 4, **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat completion of four tokens; ``fields`` override the body."""
        return self.post(CHAT, {"messages": MESSAGES, "max_tokens": 4, **fields})


class AbusedServer(Door):
    """``quire serve`` on the demo model, which makes vectors too, a connection to it, and its canary.

    Attributes:
        served: the processes.
        client: keeps its connection between calls.
    """

    def __init__(self, *flags: str) -> None:
        self.served = Served("--dtype", "float32", "--pooling", "last", "--no-standby-workers", *flags)
        SHARED.add(self.served.process.pid)
        self.client = httpx.Client(base_url=self.served.url, timeout=30)
        # the first grammar starts a process of its own
        self.client.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "structured_outputs": {"regex": "a"}})
        self.canary = Canary(self.client)
        models = self.client.get("/v1/models").json()
        self.max_model_len: int = models["data"][0]["max_model_len"]

    def request(self, method: str, path: str, **given: Any) -> httpx.Response:
        return self.client.request(method, path, **given)

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Return the wall time without the time in which the server waited for a processor."""
        with self.watch() as watch:
            yield
        assert watch.own_seconds < SLOWEST_S, f"answered after {watch.own_seconds:.1f} s of its own"

    def watch(self) -> Watch:
        """Measure how long the block takes the server, without the time in which it waited for a processor."""
        return Watch(self.served.process.pid)

    def check(self) -> None:
        """Check that the attack had no effect on the processes, the log and the answers to other clients."""
        assert self.served.process.poll() is None, "the server has ended"
        accidents = [line for line in self.served.log if ACCIDENTS.search(line)]
        assert not accidents, accidents
        self.canary.check()

    def close(self) -> None:
        """Stop the server; it must be idle with every block free, and exit without an error in its log."""
        try:
            self.served.wait_until_idle()
        finally:
            self.client.close()
            status = self.served.stop()
        assert status == 0


class Canary:
    """A request whose correct tokens are known, because the server answered it before any attack.

    One of its blocks comes from the prefix cache and its tokens are drawn by its seed, so that blocks, rows and seeds
    of other requests that were mixed with its own would show.
    """

    _BODY: ClassVar[dict[str, Any]] = {
        "prompt": [*range(40, 60)],
        "max_tokens": 2,
        "temperature": 1.0,
        "seed": 7,
        "logprobs": 1,
        "ignore_eos": True,
    }

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._right = self._ask()
        assert self._ask() == self._right, "the canary's answer is not the same twice"

    def check(self) -> None:
        assert self._ask() == self._right, "the canary's answer has changed"

    def _ask(self) -> tuple[str, list[str]]:
        """Return the text and tokens of the answer."""
        response = self._client.post(COMPLETIONS, json=self._BODY)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return choice["text"], choice["logprobs"]["tokens"]


def check_error(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response in OpenAI's form, after checking that it contains no internals, unless the client
    has sent them.
    """
    assert response.headers["content-type"] == "application/json", response.text
    assert set(response.json()) == {"error"}, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and isinstance(error["type"], str), error
    assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None), error
    assert len(response.content) <= MAX_ERROR_BYTES, "the error repeats too much"
    leaked = INTERNALS.search(error["message"])
    is_given = leaked is not None and leaked[0].encode() in response.request.content
    assert leaked is None or is_given, f"{leaked[0]!r} in {error['message']!r}"
    assert all(char.isprintable() for char in error["message"]), error["message"]
    return error


def assert_refused(
    response: httpx.Response, status: int = 400, param: str | None = None, says: str = ""
) -> dict[str, Any]:
    """Check that the response is an error of this status that names the field ``param`` (None: any) and contains
    ``says``."""
    assert response.status_code == status, response.text[:500]
    error = check_error(response)
    if param is not None:
        assert error["param"] == param, error
    assert says in error["message"], error
    return error


def short(value: Any) -> str:
    """Return a short id for a test parameter, which may be a megabyte."""
    text = value.decode("latin-1") if isinstance(value, bytes) else repr(value)
    return text[:28].encode("ascii", "backslashreplace").decode()
