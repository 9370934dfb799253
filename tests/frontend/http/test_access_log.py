"""One log line per request and one per response."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[str, dict[str, Any]]]]]:
    """Return a function that returns (event, data) of each record of the front end so far."""
    with caplog.at_level(logging.INFO, "quire.http"):
        yield lambda: [(record.event, record.data) for record in caplog.records if record.name == "quire.http"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_request_and_response(client: Any, lines: Any, stream: bool) -> None:
    response = client.complete(max_tokens=2, n=2, stream=stream)
    request_id = response.headers["x-request-id"]
    (first, received), (second, sent) = lines()
    prompt_tokens = received.pop("prompt_tokens")
    assert first == "request"
    assert received == {"id": request_id, "prompts": 1, "n": 2, "max_tokens": 2, "stream": stream}
    assert second == "response" and sent.pop("seconds") >= 0
    assert sent == {
        "id": request_id,
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": prompt_tokens,
        "output_tokens": 4,
        "finish": "length",
    }


def test_refusals_have_a_line_without_tokens(client: Any, lines: Any) -> None:
    client.post("/v1/completions", json={"prompt": "one", "max_tokens": -1})
    client.get("/nothing" + "x" * 1000)
    assert [(data["path"][:20], data["status"], "finish" in data) for _, data in lines()] == [
        ("/v1/completions", 400, False),
        ("/nothingxxxxxxxxxxxx", 404, False),
    ]
    assert len(lines()[1][1]["path"]) < 200


def test_the_clients_id_is_logged(client: Any, lines: Any) -> None:
    headers = {"x-request-id": "job-7"}
    for max_tokens in (2, -1):
        client.request("POST", "/v1/completions", json={"prompt": "one", "max_tokens": max_tokens}, headers=headers)
    (_, received), (_, sent), (_, refused) = lines()
    assert received["id"] == sent["id"] and "job-7" in sent["id"] and sent["client_id"] == "job-7"
    assert "id" not in refused and refused["client_id"] == "job-7"


def test_probes_and_scrapes_are_logged_at_debug_only(client: Any, lines: Any, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/metrics"):
        client.get(path)
    assert not lines()
    caplog.set_level(logging.DEBUG, "quire.http")
    client.get("/health")
    assert [data["path"] for _, data in lines()] == ["/health"]


def test_warning_level_logs_no_requests(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire.http"):
        client.complete(max_tokens=2)
    assert not [record for record in caplog.records if record.name == "quire.http"]
