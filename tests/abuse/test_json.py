"""Bodies that are invalid JSON, not an object, or too large; fields of every wrong type, and unknown fields."""

import re

import pytest
from abuse import CHAT, COMPLETIONS, MESSAGES, assert_refused, short
from abused_app import AbusedApp

from quire.frontend.http.serving.body import MAX_BODY_WEIGHT

GENERATING = (COMPLETIONS, CHAT)
DEEP = 100_000
TOO_MUCH: list[bytes] = [
    *(unit * DEEP for unit in (b"[", b'{"prompt":', b"[[", b'[{"a":', b'{"a":[', b'{"":')),
    b'{"prompt": "x", "metadata": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    b'{"prompt": "x", "metadata": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    *(b'{"prompt": "x", "seed": ' + b"1" * digits + b"}" for digits in (5_000, 10**6)),
    b'{"prompt": "x", "seed": -' + b"9" * 10**6 + b"}",
    b'{"prompt": "x", "temperature": 0.' + b"1" * 10**6 + b"e" + b"9" * 1000 + b"}",
    b'{"prompt": "x", "temperature": 1e' + b"9" * 10**6 + b"}",
    b'{"prompt": "x"' + b" " * 10**6,
    b"\n" * 10**6,
    b"\\" * 10**6,
    b'"' * 10**6,
    b'{"a": "' + b'\\"' * 10**6,
    *(b'{"prompt": "x", "user": ' + unit * (MAX_BODY_WEIGHT // 2) + b"1]}" for unit in (b"[1,{},",)),
]
MANY = MAX_BODY_WEIGHT + 10


def test_too_deep_or_too_large(app: AbusedApp) -> None:
    """A parser could overflow the stack."""
    for body in TOO_MUCH:
        assert app.post(COMPLETIONS, content=body).status_code == 400, short(body)


def test_commas_in_strings_are_not_counted(app: AbusedApp) -> None:
    for text in ("," * MANY, "[" * MANY, '\\"{' * MANY, "\\\\,\\n" * MANY):
        content = f'{{"prompt": "{text}"}}'.encode()
        assert_refused(app.post(COMPLETIONS, content=content), 400, "prompt", "maximum context length")


def test_last_duplicate_field_wins(app: AbusedApp) -> None:
    twice = app.post(COMPLETIONS, content=b'{"n": 0, "prompt": [3], "max_tokens": 1, "prompt": [4, 5], "n": 1}')
    assert twice.status_code == 200 and twice.json()["usage"]["prompt_tokens"] == 2
    assert_refused(app.post(COMPLETIONS, content=b'{"prompt": [3], "n": 1, "n": 0}'), 400, "n")


WRONG_NAMES: list[str] = [
    *("temprature", "Temperature", "max_token", "maxTokens", " n", "n ", "n\n", "n\x00", "", "x", "é", "😀"),
    "__class__",
    *("prompt.0", "a\nb\x1b[31m", "n" * 100_000, "‮gnol", "constructor", "__proto__", "request_id", "X-Request-Id"),
    *("prompt_token_ids", "num_beams", "beam_size"),
    *("mm_processor_kwargs", "bad_words_token_ids", "n_", "stop_", "session_id", "resumable"),
    "output_token_ids",
]


@pytest.mark.parametrize("path", GENERATING)
def test_unknown_fields(app: AbusedApp, path: str) -> None:
    """They have no effect, and the header that names them is one line of printable ASCII."""
    for name in WRONG_NAMES:
        body = {"prompt": [5], "messages": MESSAGES}
        del body["messages" if path == COMPLETIONS else "prompt"]
        response = app.post(path, {**body, name: 1, "max_tokens": 1})
        assert response.status_code == 200, (name, response.text)
        header = response.headers["x-quire-ignored-fields"]
        assert header == (re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) or "?")
        assert app.engine.added[-1].params.max_tokens == 1


def test_many_unknown_fields(app: AbusedApp, caplog: pytest.LogCaptureFixture) -> None:
    """The number of names in the header and in the log is limited."""
    response = app.complete(**{f"field_{i}": i for i in range(2_000)})
    assert response.headers["x-quire-ignored-fields"] == ",".join(f"field_{i}" for i in range(16))
    for i in range(270):
        app.complete(**{f"other_{i}": i})
    assert sum(record.levelname == "WARNING" for record in caplog.records) <= 257
