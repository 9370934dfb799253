"""Routed experts in the responses of completions and chat, from an engine with made-up rows."""

import base64
from typing import Any

import numpy as np
import pytest
from fake_engine import fake_experts

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.protocol.model.model_config import MoeConfig

MOE = MoeConfig(num_experts=300, num_experts_per_token=2, intermediate_size=8, layers=[0, 2])


@pytest.fixture
def app(engine: Any, text_in: Any) -> Any:
    return make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",), moe=MOE))


def read(choice: dict[str, Any]) -> np.ndarray[Any, Any]:
    given = choice["routed_experts"]
    return np.frombuffer(base64.b64decode(given["data"]), given["dtype"]).reshape(given["shape"])


@pytest.mark.parametrize("ask", ["complete", "chat"])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "max_tokens": 3}, {"stop": "three"}], ids=str)
def test_choices_have_the_experts_of_all_tokens_but_the_last(
    client: Any, engine: Any, ask: str, fields: dict[str, Any]
) -> None:
    response = getattr(client, ask)(return_routed_experts=True, **fields).json()
    choices = response["choices"]
    assert len(choices) == fields.get("n", 1)
    num_rows = response["usage"]["prompt_tokens"] + response["usage"]["completion_tokens"] // len(choices) - 1
    for choice in choices:
        experts = read(choice)
        assert experts.dtype == np.uint16
        np.testing.assert_array_equal(experts, fake_experts(num_rows).reshape(num_rows, 2, 2))


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_last_event_has_the_experts(client: Any, events: Any, engine: Any, ask: str) -> None:
    streamed = events(getattr(client, ask)(return_routed_experts=True, stream=True, max_tokens=4))
    choices = [event["choices"][0] for event in streamed[:-1]]
    assert [("routed_experts" in choice) for choice in choices] == [False] * (len(choices) - 1) + [True]
    assert choices[-1]["finish_reason"] == "length"
    num_rows = len(engine.added[0].prompt) + 3
    np.testing.assert_array_equal(read(choices[-1]), fake_experts(num_rows).reshape(num_rows, 2, 2))


def test_no_request_has_experts_unasked(client: Any) -> None:
    assert "routed_experts" not in client.complete().json()["choices"][0]
    refused = client.complete(return_routed_experts=True, use_beam_search=True, beam_width=2)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_routed_experts"
    wrong = client.chat(return_routed_experts="yes")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "return_routed_experts"


def test_all_answers_of_a_request_are_bounded_together(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.text.prompts.MAX_ROUTED_TOKENS", 100)
    asks = {"return_routed_experts": True, "prompt": [5] * 20, "max_tokens": 30}
    assert client.complete(**asks, n=2).status_code == 200
    refused = client.complete(**asks, n=3)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_routed_experts"
    assert "may have 100 tokens (got up to 150)" in refused.json()["error"]["message"]
    assert client.complete(n=3, prompt=[5] * 20, max_tokens=30).status_code == 200
