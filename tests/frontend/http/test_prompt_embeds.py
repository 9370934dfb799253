"""Prompts given as embeddings in completions."""

from typing import Any

import pytest
from fake_engine import FakeEngine

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.images.source import StoredItem
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import InvalidRequest


class FakeRows:
    """Reads a string as its number of rows."""

    def read(self, where: str, value: object) -> StoredItem:
        if not isinstance(value, str):
            raise InvalidRequest(f"{where} must be base64", where)
        return StoredItem(digest=value.encode().ljust(32), path="/x", num_rows=int(value), num_bytes=9, kind="rows")


@pytest.fixture
def embedding_client(client: Any, engine: FakeEngine, text_in: TextIn) -> Any:
    rows: Any = FakeRows()
    return type(client)(make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",), rows=rows)))


def test_rows_are_items_at_all_positions(embedding_client: Any, engine: FakeEngine) -> None:
    response = embedding_client.post("/v1/completions", {"prompt_embeds": ["3", "5"], "max_tokens": 2})
    assert response.status_code == 200, response.text
    assert [choice["text"] for choice in response.json()["choices"]] == ["one two"] * 2
    assert [sequence.prompt for sequence in engine.added] == [[0] * 3, [0] * 5]
    assert [[(item.kind, item.ranges) for item in items] for items in engine.items] == [
        [("rows", [(0, 3)])],
        [("rows", [(0, 5)])],
    ]
    assert response.json()["usage"]["prompt_tokens"] == 8
    assert "image_tokens" not in response.json()["usage"]["prompt_tokens_details"]


REFUSED = [
    ({"prompt_embeds": 7}, "prompt_embeds", "prompt_embeds must be base64"),
    ({"prompt_embeds": ["3", {}]}, "prompt_embeds[1]", "prompt_embeds[1] must be base64"),
    ({"prompt_embeds": []}, "prompt_embeds", "must hold 1 to 2048 prompts (got 0)"),
    ({"prompt_embeds": "3", "prompt": "x"}, "prompt_embeds", "cannot be combined with prompt"),
    ({"prompt_embeds": "3", "echo": True}, "prompt_embeds", "cannot be combined with echo"),
    ({"prompt_embeds": "3", "session": "s"}, "prompt_embeds", "cannot be combined with session"),
    ({"prompt_embeds": "3", "prompt_logprobs": 1}, "prompt_logprobs", "which have no token ids (got 1)"),
    ({"prompt_embeds": "3", "repetition_penalty": 1.5}, "repetition_penalty", "which have no token ids (got 1.5)"),
    ({"prompt_embeds": "999"}, "prompt_embeds", "maximum context length is 256 tokens"),
    ({}, "prompt", "prompt is required"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_refused_with_the_field(embedding_client: Any, body: Any, param: str, message: str) -> None:
    response = embedding_client.post("/v1/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and message in error["message"]


def test_a_server_without_the_flag(client: Any) -> None:
    error = client.post("/v1/completions", {"prompt_embeds": "3"}).json()["error"]
    assert error["message"].endswith("must be started with --enable-prompt-embeds") and error["code"] == "unsupported"
    error = client.chat(prompt_embeds="3").json()["error"]
    assert error["message"] == "prompt_embeds is not supported: use /v1/completions"
