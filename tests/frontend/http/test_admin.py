"""The administrator's routes: their key, modes of a pause, the state of the engine, and bad requests."""

from typing import Any

import pytest
from fake_engine import FakeEngine

from quire.frontend.http.app import ADMIN_ROUTES, make_app
from quire.frontend.http.routes import admin
from quire.frontend.http.serving.gate import ADMIN_PATH
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.serve_options import ServeOptions
from quire.frontend.text.text_in import TextIn
from quire.launch.config.api_keys import read_admin_keys
from quire.protocol.errors import ConfigError
from quire.protocol.wire.front_end_messages import EndReason, Histogram, RequestState, Statistics, TenantState

PATHS = [(row.methods, row.path) for row in ADMIN_ROUTES]
ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
def administered(client: Any, engine: FakeEngine, text_in: TextIn) -> Any:
    """A client of a server that has a user's key and an administrator's."""
    settings = ServerSettings(
        text_in=text_in, served_model_names=("tiny",), api_keys=("user",), admin_api_keys=("admin",)
    )
    return type(client)(make_app(engine, settings))


class TestKeys:
    @pytest.mark.parametrize(("method", "path"), PATHS)
    def test_without_a_key_of_their_own_the_routes_do_not_exist(
        self, client: Any, engine: FakeEngine, method: str, path: str
    ) -> None:
        assert path.startswith(ADMIN_PATH)
        assert client.request(method, path, headers=ADMIN).status_code == 404
        assert engine.controls == []

    @pytest.mark.parametrize(("method", "path"), [*PATHS, ("GET", "/admin/none")])
    def test_only_the_administrators_key_opens_them(
        self, administered: Any, engine: FakeEngine, method: str, path: str
    ) -> None:
        for headers in ({}, {"authorization": "Bearer user"}, {"x-api-key": "user"}, {"authorization": "admin"}):
            refused = administered.request(method, path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_api_key")
        assert engine.controls == []
        found = administered.request(method, path, headers=ADMIN)
        one_engine = path.startswith("/admin/engines")  # has no orders
        assert found.status_code == (404 if path == "/admin/none" else 409 if one_engine else 200)

    def test_it_does_not_open_other_paths(self, administered: Any) -> None:
        assert administered.request("GET", "/v1/models", headers=ADMIN).status_code == 401
        assert administered.request("GET", "/v1/models", headers={"x-api-key": "user"}).status_code == 200

    def test_a_key_for_both_is_refused_at_the_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="must not be an API key"):
            read_admin_keys(ServeOptions(admin_api_key=["other", "same"]), ["same"])
        monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "variable")
        assert read_admin_keys(ServeOptions(), ["same"]) == ["variable"]


@pytest.mark.parametrize(
    ("query", "controls", "paused"),
    [
        ("", ["pause_new"], "wait"),
        ("?mode=wait", ["pause_new"], "wait"),
        ("?mode=keep", ["pause"], "keep"),
        ("?mode=abort", ["pause_new", "abort_all"], "wait"),
    ],
)
def test_modes_of_a_pause(administered: Any, engine: FakeEngine, query: str, controls: list[str], paused: str) -> None:
    answer = administered.request("POST", f"/admin/pause{query}", headers=ADMIN)
    assert answer.json() == {"paused": paused, "running": 3, "waiting": 2}
    assert engine.controls == controls
    for path, status in (("/ready", 503), ("/health", 200)):
        found = administered.get(path)
        assert (found.status_code, found.json()) == (status, {"status": "paused"})
    assert administered.request("POST", "/admin/resume", headers=ADMIN).json()["paused"] is None
    assert administered.get("/ready").json() == {"status": "ready"}


@pytest.mark.parametrize(
    ("path", "body", "part", "param"),
    [
        ("/admin/pause?mode=now", b"", "mode must be wait, keep or abort (got 'now')", "mode"),
        ("/admin/pause?mode=", b"", "mode must be", "mode"),
        ("/admin/pause?mode=keep&mode=wait", b"", "once", "mode"),
        ("/admin/pause?clear_cache=true", b"", "unknown or repeated parameter 'clear_cache'", "clear_cache"),
        ("/admin/resume?mode=keep", b"", "no parameters", "mode"),
        ("/admin/pause", b'{"mode": "abort"}', "must have no body", None),
        ("/admin/reset_prefix_cache", b"x", "must have no body", None),
    ],
)
def test_an_order_that_is_not_understood_has_no_effect(
    administered: Any, engine: FakeEngine, path: str, body: bytes, part: str, param: str | None
) -> None:
    refused = administered.request("POST", path, headers=ADMIN, content=body)
    assert refused.status_code == 400 and part in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == param
    assert engine.controls == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one"}]}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "one"}]}),
        ("/v1/responses", {"input": "one"}),
    ],
)
def test_an_aborted_answer_does_not_look_like_a_whole_one(
    client: Any, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.ending = EndReason.ABORTED
    refused = client.post(path, {"model": "tiny", **body})
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "aborted by the server's administrator: retry later" in refused.json()["error"]["message"]
    streamed = client.post(path, {"model": "tiny", "stream": True, **body})
    assert streamed.status_code == 200 and "aborted by the server's administrator" in streamed.text.splitlines()[-2]


def test_reset_is_refused_while_requests_hold_blocks(administered: Any, engine: FakeEngine) -> None:
    engine.figures = Statistics(1, num_cached_blocks=12)
    reset = administered.request("POST", "/admin/reset_prefix_cache", headers=ADMIN)
    assert reset.json() == {"dropped_blocks": 12}
    engine.figures = Statistics(1, done=False, num_running=3)
    refused = administered.request("POST", "/admin/reset_prefix_cache", headers=ADMIN)
    assert refused.status_code == 409 and "3 requests hold KV blocks" in refused.json()["error"]["message"]


def test_reset_of_the_encoder_cache(administered: Any, engine: FakeEngine) -> None:
    for figures, status, part in (
        (Statistics(1, encoder_cache_tokens=64, num_encoder_cache_tokens=12), 200, '{"dropped_tokens":12}'),
        (Statistics(1, done=False, encoder_cache_tokens=64), 409, "requests need rows of the encoder cache"),
    ):
        engine.figures = figures
        answer = administered.request("POST", "/admin/reset_encoder_cache", headers=ADMIN)
        assert answer.status_code == status and part in answer.text


def test_state(administered: Any, engine: FakeEngine) -> None:
    engine.figures = Statistics(
        1,
        num_running=1,
        num_waiting=1,
        num_usable_blocks=10,
        num_free_blocks=4,
        prefix_cache_queries=8,
        prefix_cache_hit_tokens=2,
        waiting_by_reason={"kv_blocks": 1},
        tenants=[TenantState(7, 1, 1, 6)],
        requests=[
            RequestState("a-0", 7, "running", "", 0.0, 5, 3, 6, 1),
            RequestState("b-0", 7, "waiting", "kv_blocks", 10.0**12, 9, 0, 0, 0, "sql"),
        ],
        step_worker=Histogram([1.0], [3, 1], 2.0),
    )
    state = administered.request("GET", "/admin/state", headers=ADMIN).json()
    assert state["state"] == "ready" and state["paused"] is None
    assert (state["kv_use"], state["prefix_hit_share"]) == (0.6, 0.25)
    assert state["tenants"] == [{"tenant": 7, "running": 1, "waiting": 1, "kv_blocks": 6}]
    running, waiting = state["requests"]
    assert running["id"] == "a-0" and running["reason"] is None and running["seconds"] > 0
    assert waiting["reason"] == "kv_blocks" and waiting["seconds"] == 0
    assert (running["adapter"], waiting["adapter"]) == (None, "sql")
    assert state["step_parts"]["worker"] == {"count": 4, "seconds": 2.0, "mean": 0.5}
    assert state["step_parts"]["reply"] == {"count": 0, "seconds": 0.0, "mean": None}


def test_an_absent_scheduler_is_reported(
    administered: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(kind: str) -> Statistics:
        raise TimeoutError

    monkeypatch.setattr(engine, "control", never)
    refused = administered.request("POST", "/admin/pause", headers=ADMIN)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert f"in {admin.TIMEOUT_S:g} s" in refused.json()["error"]["message"]
