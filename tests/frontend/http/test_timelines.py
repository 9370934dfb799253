"""``return_timeline``: what happened to a request, in the answers of each API, from an engine with made-up events."""

import json
from typing import Any

import pytest

from quire.frontend.engine import answers

ROUTES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}


def with_timeline(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that may have a timeline: choices, the response, or the event itself."""
    return answer.get("choices") or [answer.get("response", answer)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_the_answer_has_its_events_at_its_end(client: Any, path: str, stream: bool) -> None:
    body = {"model": "tiny", "stream": stream, **ROUTES[path]}
    response = client.post(path, json=body | {"return_timeline": True})
    assert response.status_code == 200 and "x-quire-ignored-fields" not in response.headers
    lines = (
        [line[6:] for line in response.text.splitlines() if line.startswith("data: {")] if stream else [response.text]
    )
    found = [part["timeline"] for line in lines for part in with_timeline(json.loads(line)) if "timeline" in part]
    assert len(found) == 1 and found[0][:2] == [
        {"event": "queued", "seconds": 0.0},
        {"event": "scheduled", "seconds": 0.5, "tokens": 2},
    ]
    assert found[0][2] == {"event": "ended", "seconds": 1.25, "reason": "stop", "tokens": found[0][2]["tokens"]}
    assert "timeline" not in client.post(path, json=body).text
    wrong = client.post(path, json=body | {"return_timeline": "yes"})
    assert wrong.status_code == 400 and "return_timeline must be true or false" in wrong.text


def test_an_answer_ends_when_its_stop_string_is_found(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers.time, "monotonic", lambda: 10.75)
    (choice,) = client.complete(return_timeline=True, stop="three").json()["choices"]
    assert choice["timeline"][-1] == {"event": "ended", "seconds": 0.75, "reason": "stop", "tokens": 3}
    refused = client.complete(return_timeline=True, use_beam_search=True, beam_width=2).json()
    assert refused["error"]["param"] == "return_timeline"


def test_an_answer_without_tokens_has_none_in_its_timeline(client: Any) -> None:
    (choice,) = client.complete(return_timeline=True, max_tokens=0, echo=True).json()["choices"]
    assert choice["timeline"][-1] == {"event": "ended", "seconds": 1.25, "reason": "length"}
