"""LoRA adapters over HTTP: as models of every route, loaded and unloaded by an administrator."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from configs import MODEL
from fake_engine import FakeEngine
from pooled_vectors import BOTH

from quire.frontend.adapters.names import NameTable, table_path
from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.adapters.served_adapters import ServedAdapters
from quire.frontend.http.app import ADAPTER_ROUTES, make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.front_end_messages import EndReason, Statistics

ADMIN = {"authorization": "Bearer admin"}
USER = {"authorization": "Bearer user"}
MESSAGES = [{"role": "user", "content": "hello"}]
LOAD, UNLOAD = (row.path for row in ADAPTER_ROUTES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of adapters: sql, and bad, which cannot be used."""
    make_adapter(tmp_path / "all" / "sql", MODEL, seed=1)
    make_adapter(tmp_path / "all" / "bad", MODEL, settings={"use_dora": True})
    return tmp_path / "all"


def settings_of(text_in: TextIn, directory: Path, folder: Path | None) -> ServerSettings:
    adapters = ServedAdapters(AdapterReader(MODEL, 64), NameTable(table_path(directory)), folder)
    return ServerSettings(
        text_in=text_in,
        served_model_names=("tiny", "alias"),
        api_keys=("user",),
        admin_api_keys=("admin",),
        adapters=adapters,
        capabilities=Capabilities(pooling=BOTH),
    )


@pytest.fixture
def client(client: Any, engine: FakeEngine, text_in: TextIn, tmp_path: Path, folder: Path) -> Any:
    made = type(client)(make_app(engine, settings_of(text_in, tmp_path, folder)))
    made.post = lambda path, body, headers=USER: made.request("POST", path, json=body, headers=headers)
    return made


def last_adapter(engine: FakeEngine) -> AdapterRef | None:
    return engine.adapters[-1]


class TestAsModel:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
            ("/v1/responses", {"input": "hello"}),
            ("/v1/embeddings", {"input": ["hello", "you"]}),
            ("/v1/rerank", {"query": "hello", "documents": ["you"]}),
        ],
    )
    def test_every_dialect(self, client: Any, engine: FakeEngine, folder: Path, path: str, body: Any) -> None:
        for model in ("sql", "tiny", "sql"):
            answer = client.post(path, {"model": model, **body})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            adapter = last_adapter(engine)
            assert (None if adapter is None else adapter.name) == (None if model == "tiny" else "sql")
        adapter = last_adapter(engine)
        assert adapter is not None
        assert (len(adapter.digest), adapter.path) == (32, str(folder / "sql"))
        streamed = client.post(path, {"model": "sql", "stream": True, **body})
        assert '"model":"sql"' in streamed.text
        missing = client.post(path, {"model": "none", **body})
        assert missing.status_code == 404
        streamed = client.post(path, {"model": "bad", "stream": True, **body})
        assert (streamed.status_code, "DoRA" in streamed.text, str(folder) in streamed.text) == (400, True, False)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "hello"}),
            ("/tokenize", {"messages": MESSAGES}),
            ("/detokenize", {"tokens": [5, 6]}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES}),
            ("/v1/responses/input_tokens", {"input": "hello"}),
        ],
    )
    def test_routes_without_answers(self, client: Any, engine: FakeEngine, path: str, body: Any) -> None:
        for model, status in (("sql", 200), ("tiny", 200), ("none", 404), ("bad", 400)):
            assert client.post(path, {"model": model, **body}).status_code == status
        assert engine.added == []

    def test_all_sequences_of_a_request_have_it(self, client: Any, engine: FakeEngine) -> None:
        client.post("/v1/completions", {"model": "sql", "prompt": ["one", "two"], "n": 2})
        assert [each and each.name for each in engine.adapters] == ["sql"] * 4

    def test_a_fork_keeps_the_content_of_its_parent(
        self, client: Any, engine: FakeEngine, folder: Path, text_in: TextIn
    ) -> None:
        engine.hang_after = 1

        async def work() -> None:
            transport = httpx.ASGITransport(client.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=USER) as http:
                body = {"model": "sql", "prompt": "hello"}
                running = asyncio.create_task(http.post("/v1/completions", json=body))
                while not (engine.added and engine.added[0].waiting.is_set()):
                    await asyncio.sleep(0)
                engine.hang_after = None
                make_adapter(folder / "sql", MODEL, seed=2)
                name = engine.added[0].request_id.rpartition("-")[0]
                forked = await http.post(f"/v1/requests/{name}/fork", json={"n": 2})
                assert (forked.status_code, forked.json()["model"]) == (200, "sql")
                running.cancel()

        asyncio.run(work())
        first, *forks = engine.adapters
        assert first is not None
        assert forks == [first, first]

    def test_models_are_listed(self, client: Any) -> None:
        cards = client.get("/v1/models", headers=USER).json()["data"]
        found = {card["id"]: (card["root"], card["parent"], card["max_model_len"]) for card in cards}
        both = {"sql": ("sql", "tiny", 256), "bad": ("bad", "tiny", 256)}
        assert found == {"tiny": ("tiny", None, 256), "alias": ("alias", None, 256), **both}
        assert client.get("/v1/models/sql", headers=USER).json()["parent"] == "tiny"
        assert client.get("/v1/models/none", headers=USER).status_code == 404

    def test_refusals_of_the_engine_name_no_path(self, client: Any, engine: FakeEngine, folder: Path) -> None:
        text = f"{folder / 'sql'}: its content has changed"
        engine.refuse = InvalidRequest(text, "model", "adapter_not_loaded")
        refused = client.post("/v1/completions", {"model": "sql", "prompt": "hello"})
        error = refused.json()["error"]
        assert (refused.status_code, error["message"], error["code"]) == (
            503,
            "sql: its content has changed",
            "adapter_not_loaded",
        )
        engine.refuse, engine.ending, engine.detail = None, EndReason.ERROR, f"adapter_not_loaded: {text}"
        failed = client.post("/v1/completions", {"model": "sql", "prompt": "hello"})
        assert (failed.status_code, failed.json()["error"]["message"]) == (503, "sql: its content has changed")


class TestRuntime:
    def test_routes_need_an_administrators_key_and_adapters(
        self, client: Any, engine: FakeEngine, text_in: TextIn, tmp_path: Path, folder: Path
    ) -> None:
        body = {"lora_name": "new", "lora_path": str(folder / "sql")}
        for path in (LOAD, UNLOAD):
            assert client.post(path, body).status_code == 401
        settings = settings_of(text_in, tmp_path, folder)
        for without in (replace(settings, adapters=None), replace(settings, admin_api_keys=())):
            app = type(client)(make_app(engine, without))
            for path in (LOAD, UNLOAD):
                headers = ADMIN if without.admin_api_keys else USER
                missing = app.request("POST", path, json=body, headers=headers)
                assert missing.status_code == 404
                assert "needs --enable-lora and --admin-api-key" in missing.json()["error"]["message"]

    def test_load_name_and_unload(
        self, client: Any, engine: FakeEngine, text_in: TextIn, tmp_path: Path, folder: Path
    ) -> None:
        other = type(client)(make_app(engine, settings_of(text_in, tmp_path, None)))  # another front end
        assert other.post("/v1/completions", {"model": "new", "prompt": "x"}, headers=USER).status_code == 404
        loaded = client.post(LOAD, {"lora_name": "new", "lora_path": str(folder / "sql")}, ADMIN)
        assert (loaded.status_code, loaded.json()["id"], loaded.json()["root"]) == (200, "new", "sql")
        assert str(folder) not in loaded.text
        assert other.post("/v1/completions", {"model": "new", "prompt": "x"}, headers=USER).json()["model"] == "new"
        adapter = last_adapter(engine)
        assert adapter is not None
        assert adapter.name == "new"
        engine.figures = Statistics(1, done=True)
        assert other.post(UNLOAD, {"lora_name": "new"}, headers=ADMIN).json()["deleted"] is True
        assert engine.asked == [UnloadAdapter(adapter.name, adapter.digest)]
        assert client.post("/v1/completions", {"model": "new", "prompt": "x"}).status_code == 404
        assert client.post(UNLOAD, {"lora_name": "new"}, ADMIN).status_code == 404

    def test_errors(self, client: Any, folder: Path) -> None:
        sql, bad = str(folder / "sql"), str(folder / "bad")
        assert client.post(LOAD, {"lora_name": "a", "lora_path": sql}, ADMIN).status_code == 200
        make_adapter(folder / "other", MODEL, seed=3)
        other = str(folder / "other")
        for body, status, code in (
            ({"lora_name": "a", "lora_path": sql}, 200, None),
            ({"lora_name": "a", "lora_path": other}, 409, "adapter_exists"),
            ({"lora_name": "a", "lora_path": other, "load_inplace": True}, 200, None),
            ({"lora_name": "b", "lora_path": bad}, 400, "invalid_adapter"),
            ({"lora_name": "b", "lora_path": bad + "/none"}, 404, "adapter_not_found"),
            ({"lora_name": "tiny", "lora_path": sql}, 400, "invalid_value"),
            ({"lora_name": "../b", "lora_path": sql}, 400, "invalid_value"),
            ({"lora_name": 7, "lora_path": sql}, 400, "invalid_value"),
            ({"lora_name": "b"}, 400, "missing_required_parameter"),
            ({"lora_name": "b", "lora_path": sql, "what": 1}, 400, "unknown_parameter"),
        ):
            answer = client.post(LOAD, body, ADMIN)
            assert (answer.status_code, answer.json().get("error", {}).get("code")) == (status, code), answer.text
        missing = client.post(LOAD, {"lora_name": "b", "lora_path": bad + "/none"}, ADMIN).json()["error"]
        assert missing["message"] == f"lora_path must be a folder on the server's machine (got '{bad}/none')"
        for body, status in (({"lora_name": "tiny"}, 400), ({"lora_name": "x"}, 404), ({}, 400)):
            refused = client.post(UNLOAD, body, ADMIN)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, "lora_name")

    def test_unload_waits_for_requests_unless_told_otherwise(self, client: Any, engine: FakeEngine) -> None:
        engine.figures = Statistics(1, done=False)
        refused = client.post(UNLOAD, {"lora_name": "sql", "wait": False}, ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_in_use")
        assert len(engine.asked) == 1

        async def work() -> None:
            transport = httpx.ASGITransport(client.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=ADMIN) as http:
                waiting = asyncio.create_task(http.post(UNLOAD, json={"lora_name": "sql", "force": True}))
                while len(engine.asked) < 3:
                    await asyncio.sleep(0.01)
                assert not waiting.done()
                engine.figures = Statistics(1, done=True)
                assert (await waiting).json() == {"id": "sql", "object": "model", "deleted": True}

        asyncio.run(work())
        assert {each.force for each in engine.asked[1:]} == {True}


def test_without_adapters_models_are_as_before(client: Any, engine: FakeEngine, text_in: TextIn) -> None:
    app = type(client)(make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",))))
    (card,) = json.loads(app.get("/v1/models").text)["data"]
    assert set(card) == {
        "id",
        "object",
        "created",
        "owned_by",
        "max_model_len",
        "tasks",
        "implementation",
        "input_modalities",
    }
    assert app.request("POST", "/v1/completions", json={"model": "sql", "prompt": "x"}).status_code == 404
