"""Web pages and host names: cross-site requests, DNS rebinding, CORS."""

from collections.abc import Iterator
from typing import Any

import pytest
from front_end import FrontEnd, post, status_of

from quire.launch.cli import main

BODY = b'{"prompt": [1, 2], "max_tokens": 3}'
JSON = "content-type: application/json"
PAGE = "https://chat.example.com"
CLOSE = "connection: close"


@pytest.fixture(scope="module")
def default() -> Iterator[FrontEnd]:
    yield from running(FrontEnd())


@pytest.fixture(scope="module")
def opened() -> Iterator[FrontEnd]:
    """A server that allows a page and some host names."""
    allowed = {"allowed_origins": (PAGE, "null"), "allowed_hosts": ("gpu.example.com", "*.quire.example.org")}
    yield from running(FrontEnd(settings=allowed))


@pytest.fixture(scope="module")
def keyed() -> Iterator[FrontEnd]:
    yield from running(FrontEnd(keys=("secret",), settings={"allowed_origins": (PAGE,)}))


def running(front_end: FrontEnd) -> Iterator[FrontEnd]:
    yield front_end
    front_end.check()
    front_end.close()


def send(front_end: FrontEnd, *headers: str, host: str = "x", method: str = "POST", path: str = "") -> bytes:
    data = post(path or "/v1/completions", BODY, CLOSE, *headers)
    return front_end.ask(data.replace(b"host: x", f"host: {host}".encode(), 1).replace(b"POST", method.encode(), 1))


def header(answer: bytes, name: str) -> str | None:
    for line in answer.partition(b"\r\n\r\n")[0].decode().split("\r\n"):
        if line.lower().startswith(f"{name}: "):
            return line.partition(": ")[2]
    return None


class TestHost:
    @pytest.mark.parametrize(
        "host",
        [
            *("127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "[::1]", "[fe80::1]:8000", "localhost:8000", "LOCALHOST"),
            *("quire", "quire:8000", "quire.default.svc.cluster.local", "box.internal:1", "a.localhost"),
        ],
    )
    def test_addresses_and_private_names_are_served(self, default: FrontEnd, host: str) -> None:
        assert status_of(send(default, host=host)) == 200

    @pytest.mark.parametrize(
        "host",
        [
            *(
                "rebound.example.com",
                "rebound.example.com:8000",
                "example.com.",
                "127.0.0.1.example.com",
                "localhost.com",
            ),
            *("[::1", "a b", "x/y", "evil.com#localhost", "127.0.0.1:80:80", "ai.", "x@localhost", "xn--e1a.com"),
        ],
    )
    def test_a_public_name_is_refused(self, default: FrontEnd, host: str) -> None:
        before = len(default.engine.added)
        answer = send(default, host=host)
        assert status_of(answer) == 403 and b"host_not_allowed" in answer
        assert status_of(send(default, host=host, method="GET", path="/v1/models")) == 403
        assert status_of(send(default, host=host, method="GET", path="/health")) == 200
        assert len(default.engine.added) == before

    def test_allowed_names(self, opened: FrontEnd) -> None:
        for host, status in (
            *(("gpu.example.com:8000", 200), ("GPU.example.com", 200), ("a.quire.example.org", 200)),
            *(("quire.example.org", 403), ("evilgpu.example.com", 403), ("xquire.example.org", 403)),
        ):
            assert status_of(send(opened, host=host)) == status, host

    def test_with_keys_any_name_is_served(self, keyed: FrontEnd) -> None:
        assert status_of(send(keyed, "authorization: Bearer secret", host="llm.example.com")) == 200
        assert status_of(send(keyed, host="llm.example.com")) == 401


class TestOrigin:
    @pytest.mark.parametrize(
        "origin", ["https://evil.example", "null", "http://x:1", "http://127.0.0.1", "file://", PAGE]
    )
    @pytest.mark.parametrize("kind", [JSON, "content-type: text/plain", "x: y"])
    def test_a_page_cannot_use_the_server_by_default(self, default: FrontEnd, origin: str, kind: str) -> None:
        before = len(default.engine.added)
        answer = send(default, f"origin: {origin}", kind)
        assert status_of(answer) == 403 and b"origin_not_allowed" in answer
        assert header(answer, "access-control-allow-origin") is None
        assert len(default.engine.added) == before

    def test_an_allowed_page_needs_json(self, opened: FrontEnd) -> None:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            answer = send(opened, f"origin: {PAGE}", f"content-type: {kind}")
            assert status_of(answer) == 415 and b"application/json" in answer
        assert status_of(send(opened, f"origin: {PAGE}", "content-type: Application/JSON; charset=utf-8")) == 200

    def test_a_program_needs_no_content_type(self, default: FrontEnd) -> None:
        for kind in ("x: y", "content-type: application/x-www-form-urlencoded"):
            assert status_of(send(default, kind)) == 200

    def test_the_servers_own_page_is_allowed(self, default: FrontEnd) -> None:
        for host in ("127.0.0.1:8000", "[::1]:8000", "localhost:8000"):
            assert status_of(send(default, f"origin: http://{host}", JSON, host=host)) == 200
            assert status_of(send(default, f"origin: http://{host}", "content-type: text/plain", host=host)) == 415

    def test_several_origins_are_refused(self, opened: FrontEnd) -> None:
        assert status_of(send(opened, "origin: https://evil.example", f"origin: {PAGE}", JSON)) == 403
        assert status_of(send(opened, f"origin: {PAGE} https://evil.example", JSON)) == 403


class TestCors:
    def preflight(self, front_end: FrontEnd, origin: str) -> bytes:
        asked = ("access-control-request-method: POST", "access-control-request-headers: authorization,content-type")
        return send(front_end, f"origin: {origin}", *asked, method="OPTIONS")

    def test_preflight_of_an_allowed_page_needs_no_key(self, keyed: FrontEnd) -> None:
        answer = self.preflight(keyed, PAGE)
        assert status_of(answer) == 200
        assert header(answer, "access-control-allow-origin") == PAGE
        assert "POST" in (header(answer, "access-control-allow-methods") or "")
        assert {"authorization", "content-type"} <= set(
            (header(answer, "access-control-allow-headers") or "").split(",")
        )
        assert status_of(self.preflight(keyed, "https://evil.example")) == 403
        stolen = ("origin: https://evil.example", JSON, "authorization: Bearer secret")
        assert status_of(send(keyed, *stolen)) == 403

    def test_responses_and_errors_can_be_read_by_the_page(self, keyed: FrontEnd) -> None:
        for key, status in (("secret", 200), ("wrong", 401)):
            answer = send(keyed, f"origin: {PAGE}", JSON, f"authorization: Bearer {key}")
            assert status_of(answer) == status
            assert header(answer, "access-control-allow-origin") == PAGE
            assert "x-request-id" in (header(answer, "access-control-expose-headers") or "")

    def test_streams_can_be_read_by_the_page(self, opened: FrontEnd) -> None:
        data = post("/v1/completions", BODY[:-1] + b', "stream": true}', CLOSE, f"origin: {PAGE}", JSON)
        answer = opened.ask(data)
        assert header(answer, "access-control-allow-origin") == PAGE and b"[DONE]" in answer

    def test_by_default_there_is_no_preflight(self, default: FrontEnd) -> None:
        assert status_of(self.preflight(default, PAGE)) == 403
        assert status_of(send(default, method="OPTIONS")) == 405

    def test_all_pages(self) -> None:
        front_end = FrontEnd(settings={"allowed_origins": ("*",)})
        for origin in (PAGE, "null", "https://any.example"):
            assert header(self.preflight(front_end, origin), "access-control-allow-origin") in ("*", origin)
            assert status_of(send(front_end, f"origin: {origin}", JSON)) == 200
            assert status_of(send(front_end, f"origin: {origin}", "content-type: text/plain")) == 415
        front_end.close()


def test_browsers_must_not_guess_types(default: FrontEnd) -> None:
    for data in (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"GET /health HTTP/1.1\r\nhost x\r\n\r\n"):
        assert header(default.ask(data), "x-content-type-options") == "nosniff"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--allowed-origins", "chat.example.com"], "scheme://host[:port] without a path (got 'chat.example.com')"),
        (["--allowed-origins", PAGE, "https://a.example/"], "without a path (got 'https://a.example/')"),
        (["--allowed-origins", "https://*.example.com"], "must be *, null or"),
        (["--allowed-hosts", "example.com:8000"], "without a port, *.NAME or * (got 'example.com:8000')"),
        (["--allowed-hosts", "https://example.com"], "must be host names"),
        (["--allowed-hosts", "a.*.example.com"], "must be host names"),
    ],
)
def test_impossible_settings_are_refused(words: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 78 and message in error and error.count("\n") == 1
