"""Every route with every method, with and without a key, with path variants; and upgrades (A44, A45, A46)."""

import itertools
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
from abuse import INTERNALS, short
from front_end import FrontEnd, post, read_all, status_of
from starlette.routing import Route

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.connections import client_of
from quire.frontend.http.serving.gate import KEYLESS_PATHS, tenant_of_address
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import ConfigError

KEYS = ("first-key", "zweiter-schlüssel", "third key")
CLOSE = "connection: close"
# Per route: allowed methods, and the status for an authorized request without a body.
EXPECTED = {
    **dict.fromkeys(("/", "/docs", "/openapi.json"), ({"GET", "HEAD"}, 200)),
    "/v1/models": ({"GET", "HEAD"}, 200),
    "/v1/models/{name:path}": ({"GET", "HEAD"}, 200),
    "/v1/completions": ({"POST"}, 400),
    "/v1/chat/completions": ({"POST"}, 400),
    "/v1/messages": ({"POST"}, 400),
    "/v1/messages/count_tokens": ({"POST"}, 400),
    "/v1/responses": ({"GET", "HEAD", "POST"}, 400),
    "/v1/responses/compact": ({"POST"}, 400),
    "/v1/responses/input_tokens": ({"POST"}, 400),
    "/v1/responses/{id:response}": ({"GET", "HEAD", "DELETE"}, 404),
    "/v1/responses/{id:response}/input_items": ({"GET", "HEAD"}, 404),
    "/v1/responses/{id:response}/cancel": ({"POST"}, 404),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"), ({"POST"}, 400)),
    **dict.fromkeys(("/api/tags", "/api/ps", "/api/version"), ({"GET", "HEAD"}, 200)),
    "/v1/decisions": ({"POST"}, 400),
    "/v1/requests/{id:path}/fork": ({"POST"}, 400),
    "/v1/sessions": ({"POST"}, 200),
    "/v1/sessions/{id}": ({"GET", "HEAD", "DELETE"}, 404),
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/score", "/v1/score"), ({"POST"}, 400)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/v1/classify"), ({"POST"}, 400)),
    "/tokenize": ({"POST"}, 400),
    "/detokenize": ({"POST"}, 400),
    "/tokenizer_info": ({"GET", "HEAD"}, 400),
    "/health": ({"GET", "HEAD"}, 200),
    "/ready": ({"GET", "HEAD"}, 200),
    "/version": ({"GET", "HEAD"}, 200),
    "/metrics": ({"GET", "HEAD"}, 200),
}
# GET of this path begins a web socket; the ordinary request is a POST.
SOCKET_PATH, UPGRADE_REQUIRED = "/v1/responses", 426
OPEN = {"/", "/docs", "/openapi.json", "/health", "/ready", "/metrics"}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "M-SEARCH")
WRONG_KEYS = (
    *("Bearer wrong", "first-key", "Basic first-key", "Bearer", "Bearer ", "", "Bearer first-key2", "Bearer first-ke"),
    *("Bearer FIRST-KEY", "Bearerfirst-key", "Bearer  ", "Bearer first-key,third key", "Bearer \x01", "Bearer *"),
    *('Bearer "first-key"', "Bearer first-key\tx", "Token first-key", "Bearer Bearer first-key", "Bearer null"),
    *("Bearer " + "x" * 5000, "Bearer zweiter-schlussel", "Bearer 0", "Digest username=x", "Bearer first-key;"),
)


@pytest.fixture(scope="module")
def locked() -> Iterator[FrontEnd]:
    front_end = FrontEnd(keys=KEYS)
    yield front_end
    front_end.check()
    front_end.close()


@pytest.fixture(scope="module")
def unlocked() -> Iterator[FrontEnd]:
    front_end = FrontEnd()
    yield front_end
    front_end.check()
    front_end.close()


def paths() -> list[str]:
    """Return the paths of all routes of the application."""
    app = make_app(None, ServerSettings(text_in=TextIn(), served_model_names=("m",)))  # type: ignore[arg-type]
    assert all(isinstance(route, Route) for route in app.routes), "a mount or a web socket route: list it here"
    return [route.path for route in app.routes if isinstance(route, Route)]


def concrete(path: str) -> str:
    return (
        path.replace("{name:path}", "endless")
        .replace("{id:response}", "resp_1")
        .replace("{id:path}", "cmpl-1")
        .replace("{id}", f"sess_{'0' * 32}")
    )


def ask(front_end: FrontEnd, method: str, path: str, *headers: str) -> tuple[int, bytes]:
    lines = [f"{method} {path} HTTP/1.1", "host: x", CLOSE, *headers]
    answer = front_end.ask("\r\n".join(lines).encode() + b"\r\n\r\n")
    status = status_of(answer)
    body = answer.partition(b"\r\n\r\n")[2]
    if method == "HEAD":
        assert body == b""
    elif status >= 400:
        error = json.loads(body)["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert INTERNALS.search(message) is None and message.isprintable()
    return status, answer


def own_status(path: str, method: str) -> int:
    """Return the status for an authorized request without a body, and without the headers of a web socket."""
    allowed, status = EXPECTED[path]
    if method not in allowed:
        return 405
    return UPGRADE_REQUIRED if path == SOCKET_PATH and method in ("GET", "HEAD") else status


def bearer(key: str) -> str:
    return f"authorization: Bearer {key}"


def test_every_route_is_listed_here() -> None:
    """A new route must be added to EXPECTED. An administrator's route would need a key of its own."""
    assert sorted(paths()) == sorted(EXPECTED)
    assert KEYLESS_PATHS == OPEN


ADMINISTRATION = (
    *("/pause", "/resume", "/sleep", "/wake_up", "/shutdown", "/abort", "/reset_prefix_cache", "/flush_cache"),
    *("/start_profile", "/stop_profile", "/update_weights", "/update_weights_from_disk", "/collective_rpc"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/is_sleeping", "/get_server_info", "/server_info"),
    *("/set_internal_state", "/release_memory_occupation", "/redoc", "/debug", "/admin"),
    *("/v1/files", "/v1/images/generations", "/config", "/dump", "/trace", "/reload", "/env"),
)


def test_no_administrator_routes(locked: FrontEnd, unlocked: FrontEnd) -> None:
    """Without a key the status does not reveal whether the route exists."""
    for path in ADMINISTRATION:
        for method in ("GET", "POST"):
            assert ask(locked, method, path)[0] == 401
            assert ask(locked, method, path, bearer(KEYS[0]))[0] == 404
            assert ask(unlocked, method, path)[0] == 404


class TestMatrix:
    def test_each_route_and_method(self, locked: FrontEnd, unlocked: FrontEnd) -> None:
        for path, (allowed, _) in EXPECTED.items():
            for number, method in enumerate(METHODS):
                wanted, target = own_status(path, method), concrete(path)
                status, answer = ask(locked, method, target, bearer(KEYS[number % len(KEYS)]))
                assert status == wanted, (path, method, answer)
                if status == 405:
                    allow = next(line for line in answer.split(b"\r\n") if line.lower().startswith(b"allow:"))
                    assert {name.strip().decode() for name in allow[6:].split(b",")} == allowed
                status, answer = ask(locked, method, target)
                assert status == (wanted if path in OPEN else 401), (path, method, answer)
                assert path in OPEN or b"www-authenticate: Bearer" in answer
                assert ask(unlocked, method, target, bearer("any"))[0] == wanted, (path, method)

    def test_wrong_keys(self, locked: FrontEnd) -> None:
        for path in ("/v1/models", "/v1/completions", "/v1/sessions/{id}", "/health"):
            method = min(EXPECTED[path][0])
            for header in WRONG_KEYS:
                status, answer = ask(locked, method, concrete(path), f"authorization: {header}")
                # A control character in a header is invalid HTTP.
                wanted = {400, 401} if "\x01" in header else {own_status(path, method)} if path in OPEN else {401}
                assert status in wanted, (header, answer)

    def test_upgrade_is_ignored(self, locked: FrontEnd) -> None:
        """The request is served as an ordinary one. Where web sockets are served, this one's key is invalid."""
        upgrades = ("websocket", "WebSocket", "h2c", "TLS/1.0", "websocket, h2c", "x" * 200)
        cases = itertools.product((SOCKET_PATH, "/v1/models", "/v1/completions", "/health"), upgrades, (None, KEYS[0]))
        for path, upgrade, key in cases:
            headers = ["upgrade: " + upgrade, "sec-websocket-key: eA==", "sec-websocket-version: 13"]
            headers += [bearer(key)] if key else []
            lines = [f"GET {concrete(path)} HTTP/1.1", "host: x", "connection: upgrade, close", *headers]
            status = status_of(locked.ask("\r\n".join(lines).encode() + b"\r\n\r\n"))
            may = key is not None or path in OPEN
            is_socket = path == SOCKET_PATH and upgrade.lower() == "websocket"
            assert status == (401 if not may else 400 if is_socket else own_status(path, "GET")), (path, upgrade, key)


def variants(path: str) -> list[str]:
    """Return variants of a path that another server might treat as the same path."""
    first, rest = path[1:2], path[2:]
    return [
        *(f"/{path}", f"//{path}", f"{path}/", f"{path}//", f"/.{path}", f"/x/..{path}", f"/health/..{path}"),
        *(f"/health/../..{path}", f"/metrics;{path}", f"/health%2f..{path}", f"/%2f{path[1:]}", f"/%2e{path}"),
        *(f"/%5c{path[1:]}", f"/\\{path[1:]}", f"{path};x=y", f"{path}%00", f"{path}%20", f"{path}%0a"),
        *(f"{path}.json", f"{path}#/health", f"{path}%3f", f"{path}%23", f"{path}%2f", path.upper(), path.title()),
        *(f"/%25{ord(first):02x}{rest}", path.replace("/", "/%2f", 1), path.replace("/", "%2f"), f"/health{path}"),
        *(f"/health%00{path}", f"/health?{path}/..", f"/%c0%af{path[1:]}", f"/%ff{path}"),
    ]


def target_of(spelling: str) -> str:
    """Return the path that the server sees: decoded, without slashes at its end; "" for another text."""
    path = unquote(spelling.split("?")[0].split("#")[0]).rstrip("/") or "/"
    return path if spelling.startswith("/") else ""


VARIED = tuple(
    map(concrete, ("/v1/models", "/v1/completions", "/v1/responses/{id:response}", "/v1/sessions/{id}", "/metrics"))
)


class TestPathVariants:
    @pytest.mark.parametrize("path", VARIED)
    def test_path_variants_require_a_key_and_are_not_found(self, locked: FrontEnd, path: str) -> None:
        method = min(EXPECTED.get(path, ({"GET"}, 0))[0])
        for spelling in variants(path):
            target = target_of(spelling)
            status, answer = ask(locked, method, spelling)
            # 400: invalid HTTP
            assert status in ({200, 405} if target in OPEN else {400, 401}), (spelling, answer)
            status, answer = ask(locked, "OPTIONS", spelling, bearer("first-key"))
            # A model name or an id may contain any characters, and a fragment is not part of the path.
            known = unquote(spelling).startswith(("/v1/models/", "/v1/sessions/", "/v1/responses/resp_1"))
            assert status in ({400, 404, 405} if known or target in (path, *OPEN) else {400, 404}), (spelling, answer)
            assert b"location:" not in answer.lower()

    @pytest.mark.parametrize("path", VARIED)
    def test_host_and_proxy_headers_are_ignored(self, locked: FrontEnd, path: str) -> None:
        hosts = ("a/b?", "", "x:y", "[::1", "evil.example/health", "localhost", "%2f", "x" * 5000)
        targets = (path, f"http://health{path}", f"http://x/health/..{path}")
        for host, target in itertools.product(hosts, targets):
            lines = [f"GET {target} HTTP/1.1", f"host: {host}", "x-forwarded-prefix: /health", CLOSE]
            lines += ["x-original-url: /health", "x-rewrite-url: /health", "x-http-method-override: GET"]
            answer = locked.ask("\r\n".join(lines).encode() + b"\r\n\r\n")
            is_open = path in OPEN and "/.." not in target
            assert status_of(answer) == (200 if is_open else 401), (target, answer)


class TestKeys:
    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  ", "Bearer \t"])
    def test_valid_key_with_extra_spaces(self, locked: FrontEnd, key: str, scheme: str) -> None:
        assert ask(locked, "GET", "/v1/models", f"Authorization: {scheme}{key} ")[0] == 200

    @pytest.mark.parametrize("key", KEYS)
    def test_valid_key_as_anthropic_clients_send_it(self, locked: FrontEnd, key: str) -> None:
        assert ask(locked, "GET", "/v1/models", f"X-Api-Key: {key}")[0] == 200

    def test_engine_receives_the_tenant(self, locked: FrontEnd, unlocked: FrontEnd) -> None:
        body = {"prompt": [1], "max_tokens": 1, "n": 2}
        by_address = tenant_of_address("127.0.0.1", b"")
        assert by_address > 0
        for front_end, tenants in ((locked, (1, 2, 3)), (unlocked, (by_address,) * 3)):
            for key, tenant in zip(KEYS, tenants, strict=True):
                front_end.engine.tenants.clear()
                headers = {b"authorization": f"Bearer {key}".encode()}
                assert front_end.client.post("/v1/completions", json=body, headers=headers).status_code == 200
                assert front_end.engine.tenants == [tenant] * 2

    def test_without_keys_each_address_is_a_tenant(self, unlocked: FrontEnd) -> None:
        """The scheduler is fair among tenants, so a flood from one address does not delay another one."""
        body = post("/v1/completions", b'{"prompt": [1], "max_tokens": 1}', CLOSE, "x-forwarded-for: 127.0.0.3")
        found = []
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2"):
            unlocked.engine.tenants.clear()
            with unlocked.connect(body, source=source) as connection:
                assert status_of(read_all(connection)) == 200
            found += unlocked.engine.tenants
        assert found == [tenant_of_address(f"127.0.0.{last}", b"") for last in (1, 2, 1, 2)]
        assert found[0] != found[1]

    @pytest.mark.parametrize(
        ("peer", "client"),
        [
            *((("10.1.2.3", 80), "10.1.2.3"), (("::ffff:10.1.2.3", 80, 0, 0), "10.1.2.3"), ("", ""), (None, "")),
            *((("2001:db8:1:2:3::4", 1, 0, 0), "2001:db8:1:2::"), (("fe80::1%eth0", 1, 0, 2), "fe80::")),
        ],
    )
    def test_client_of_an_address(self, peer: Any, client: str) -> None:
        assert client_of(peer) == client
        assert 0 <= tenant_of_address(client, b"salt") <= 1024

    @pytest.mark.parametrize(
        "headers",
        [
            *((bearer("wrong"), bearer("first-key")), (bearer("first-key"), bearer("wrong"))),
            *((bearer("first-key"), bearer("first-key")), ("api-key: first-key",)),
            *(("x-api-key: first-key",) * 2, (bearer("wrong"), "x-api-key: first-key"), ("x-api-key: wrong",)),
            *(("proxy-authorization: Bearer first-key",), ("cookie: authorization=Bearer first-key",)),
            *(("authorization : Bearer first-key",), ("authorization: Bearer", " first-key")),
        ],
        ids=str,
    )
    def test_duplicate_or_misplaced_key_is_refused(self, locked: FrontEnd, headers: tuple[str, ...]) -> None:
        assert ask(locked, "GET", "/v1/models", *headers)[0] in (400, 401)

    def test_key_in_the_query_is_refused(self, locked: FrontEnd) -> None:
        for query in (
            *("api_key=first-key", "key=first-key", "access_token=first-key", "authorization=Bearer%20first-key"),
        ):
            assert ask(locked, "GET", f"/v1/models?{query}")[0] == 401

    def test_body_is_not_read_without_a_key(self, locked: FrontEnd) -> None:
        before = len(locked.engine.added)
        data = post("/v1/completions", b'{"prompt": [1]}', CLOSE, "authorization: Bearer wrong", length=10**6)
        assert status_of(locked.ask(data)) == 401
        assert len(locked.engine.added) == before

    @pytest.mark.parametrize("key", ["", " ", "\t", " x", "x ", "a\nb", "\x00", "a\r\nb"], ids=short)
    def test_unsafe_configured_key_is_refused_at_startup(self, key: str) -> None:
        with pytest.raises(ConfigError, match="API key"):
            ServerSettings(text_in=TextIn(), served_model_names=("m",), api_keys=("good", key))

    def test_every_key_is_compared_in_full(self, locked: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts comparisons, because times on a busy machine are noise: each key is compared once."""
        compared: list[Any] = []

        def compare(given: bytes, known: bytes) -> bool:
            compared.append(known)
            return given == known

        monkeypatch.setattr("quire.frontend.http.serving.gate.hmac.compare_digest", compare)
        for key in (*KEYS, "wrong", ""):
            compared.clear()
            ask(locked, "GET", "/v1/models", bearer(key))
            assert compared == [known.encode() for known in KEYS]
