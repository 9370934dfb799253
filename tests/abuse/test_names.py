"""Names of models, requests, cache salts and users; odd names in metrics and in the log."""

import asyncio
import re
from typing import Any

import httpx
import pytest
from abuse import COMPLETIONS, AbusedServer, assert_refused
from abused_app import AbusedApp
from front_end import EndlessEngine

from quire.frontend.http.serving.metrics import Metrics

GOOD_SALTS = ("x", "\x00", "a\nb", "😀" * 1024, "../../etc", "None", "null", " ", "\u202e", "%s", "\x1b[31m", "'", '"')


@pytest.mark.full
def test_cache_salts(server: AbusedServer) -> None:
    for salt in GOOD_SALTS:
        prompt = [*range(100, 140)]
        first, again = (server.complete(prompt=prompt, cache_salt=salt).json()["usage"] for _ in range(2))
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, again)]
        assert cached == [0, 32], "only the cache of its own salt is hit"


GOOD_JOBS = ("x", "é" * 256, " ", "../../etc", "None", "null", "\u202e", "%s", "'", '"', "{}", "a,b", "😀")


def test_job_ids(app: AbusedApp) -> None:
    for value in GOOD_JOBS:
        assert app.complete(job_id=value).status_code == 200
        assert app.engine.jobs[-1].id == value


IDS: tuple[Any, ...] = ("", "x", "a\nb", "x" * 10**6, "\x1b[31m", "../x", "cmpl-1", 5, None, True, [], {}, "😀", "\x00")
UNPRINTABLE = re.compile(rb"[\x00-\x1f\x7f]")
IDS += ("chatcmpl-" + "0" * 32, "'", '"', "{}", "%s", "a,b", "a b", "\u202e")


def test_clients_cannot_set_request_ids(app: AbusedApp) -> None:
    """A valid ``X-Request-Id`` is returned, and becomes a part of an id that is unique all the same."""
    seen = {app.complete().json()["id"]}
    for value in [*IDS, "x"]:
        made = app.complete(request_id=value, id=value).json()["id"]
        assert re.fullmatch(r"cmpl-[0-9a-f]{32}", made)
        raw = UNPRINTABLE.sub(b"", str(value).encode())[:2000]
        given = httpx.Headers([(b"x-request-id", raw)])
        response = app.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1}, headers=given)
        assert response.status_code == 200
        made = response.json()["id"]
        assert made not in seen
        seen.add(made)
        if re.fullmatch(rb"[A-Za-z0-9._:/+=@-]{1,128}", raw):
            assert re.fullmatch(rf"cmpl-{re.escape(raw.decode())}-[0-9a-f]{{16}}", made)
            assert response.headers["x-request-id"] == raw.decode()
        else:
            assert re.fullmatch(r"cmpl-[0-9a-f]{32}", made)
            assert response.headers["x-request-id"] == made


WAYS_TO_NAME = (
    *("abort", "v1/abort", "v1/completions/{}", "v1/completions/{}/cancel", "v1/responses/{}/cancel", "abort_request"),
    *("v1/requests/{}", "v1/chat/completions/{}", "cancel?request_id={}"),
)


def test_requests_cannot_be_addressed_by_id(app: AbusedApp) -> None:
    """No route takes a request id: a client can only abort the requests of its own connections."""
    made = app.complete().json()["id"]
    for path in WAYS_TO_NAME:
        for method in ("POST", "DELETE", "GET", "PUT"):
            response = app.request(method, f"/{path.format(made)}", json={"request_id": made, "rid": made})
            assert_refused(response, 404, says=" not found")


HOSTILE = (
    *('a"b', "a\nb", "a\\b", 'x"} 1\nquire:forged{a="', "\\", "\\n", '"', "{}", "é😀", "a\rb", "#", " ", "a,b=c"),
    *("\x1b[31m", "\n# HELP x", "é\u2028", "}", "{", "a\tb", "quire:x 1"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_model_name_is_one_label(name: str) -> None:
    """The metrics have one line per sample for any model name."""
    metrics = Metrics(name)
    metrics.rejected("invalid_value")
    page = asyncio.run(metrics.render(EndlessEngine())).decode()
    lines = [line for line in page.split("\n") if line and not line.startswith("#")]
    assert len(lines) > 10
    for line in lines:
        name, _, rest = line.partition("{")
        found = re.fullmatch(r'((?:\w+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} [-+.\de]+(?:Inf)?', rest)
        assert found and re.fullmatch(r"quire:\w+|process_\w+", name) and "forged" not in name, line


LOGGED = "\x1b[31mforged\x1b[0m\nquire: error: forged\r\nforged"


@pytest.mark.full
def test_client_text_is_never_a_log_line(server: AbusedServer) -> None:
    before = len(server.served.log)
    for body in (
        {"prompt": LOGGED, "max_tokens": 1},
        {"prompt": [5], "model": LOGGED},
        {"prompt": [5], LOGGED: 1},
        {"prompt": [5], "user": LOGGED, "cache_salt": LOGGED, "stop": LOGGED, "max_tokens": 1},
        {"prompt": [5], "bad_words": [LOGGED], "max_tokens": 1},
        {"prompt": [5], "structured_outputs": {"regex": LOGGED + "("}},
        {"prompt": [5], "structured_outputs": {"grammar": LOGGED}},
        {"prompt": [5], "logit_bias": {LOGGED: 1}},
    ):
        server.post(COMPLETIONS, body)
    server.chat(messages=[{"role": LOGGED, "content": LOGGED}])
    server.chat(tools=[{"type": "function", "function": {"name": LOGGED}}])
    server.client.get("/v1/models/" + "forged%0aforged%1b")
    server.client.get("/" + "forged%0aforged%1b", headers={"user-agent": "forged\x1b[31m", "x-forged": "forged"})
    server.check()
    lines = [line for line in server.served.log[before:] if "forged" in line]
    # Only paths, each quoted within the record of its response, and the name of an ignored field.
    paths = r'Z INFO quire\.http: response .* path="/[\w/]*forged\\nforged\\u001b" status=40'
    field = r"Z WARNING quire\.http: unknown request field ignored field=\?\?31mforged\?\?0m\?quire\?\?error\?\?forged"
    assert lines and all(re.search(f"{paths}|{field}", line) for line in lines), lines
