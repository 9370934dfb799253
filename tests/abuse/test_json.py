"""Bodies that are invalid JSON, not an object, or too large; fields of every wrong type, and unknown fields."""

import re
from typing import Any

import pytest
from abuse import CHAT, COMPLETIONS, MESSAGES, AbusedServer, assert_refused, short
from abused_app import AbusedApp
from tiers import thinned

from quire.frontend.http.schema.bodies import SAMPLING_FIELDS, ChatBody, CompletionBody, TokenizeBody
from quire.frontend.http.schema.pooling_bodies import EmbeddingBody, RerankBody, ScoreBody
from quire.frontend.http.serving.body import MAX_BODY_WEIGHT

GENERATING = (COMPLETIONS, CHAT)
POOLING: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingBody, {"input": [5]}),
    "/pooling": (EmbeddingBody, {"input": "x", "task": "token_embed"}),
    "/v1/score": (ScoreBody, {"text_1": "x", "text_2": "y"}),
    "/v1/rerank": (RerankBody, {"query": "x", "documents": ["y"]}),
}
PATHS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank")
NOT_JSON: list[bytes] = [
    *(b"", b" ", b"\x00", b"hello", b"'x'", b"{", b"}", b"{]", b"[}", b'{"prompt"}', b'{"prompt":}', b"{prompt: 1}"),
    *(b'{"prompt": "x",}', b'{"prompt": [5,]}', b'{"prompt": [,5]}', b'{"prompt": "x"} {}', b'{"prompt": "x"}x'),
    *(b'{"prompt": "x"', b'{"prompt": "x', b'{"prompt": "\\', b'{"prompt": "\\u12', b'{"prompt": "\\x41"}'),
    *(b"{'prompt': 'x'}", b'{"prompt": 05}', b'{"prompt": +5}', b'{"prompt": .5}', b'{"prompt": 0x5}', b"nul", b"tru"),
    *(b'{"prompt": "a\nb"}', b'{"prompt": "a\tb"}', b'{"prompt": "\x00"}', b'{"prompt": "x"}\x00', b"\x1f\x8b\x08\x00"),
    *(b'// x\n{"prompt": "x"}', b'{"prompt": "x" /* y */}', b"prompt=x&max_tokens=1", b"<prompt>x</prompt>"),
    *(b'\xef\xbb\xbf{"prompt": "x"}', '{"prompt": "x"}'.encode("utf-16"), '{"prompt": "x"}'.encode("utf-32")),
    *(b'{"prompt": "\xff"}', b'{"prompt": "\xc3\x28"}', b'{"prompt": "\xed\xa0\x80"}'),
    b'{"prompt": "\xf5\x80\x80\x80"}',
    *(b'{"prompt": "\xc0\xaf"}', b'{"prompt": "\xe2\x82"}', b'{"\xff": 1}', b'{"prompt": "\\ud800"}'),
    *(b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\\ud83dx"}', b'{"prompt": "x", "a": 1e}'),
    b'{"prompt": "x", "a": -}',
]
NO_OBJECTS = (b"null", b"true", b"5", b"-1.5e3", b'"x"', b"[]", b"[1]", b'[{"prompt": "x"}]', b"[[]]")
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
MANY_VALUES = {
    "ids": b'{"prompt": [' + b"5," * MANY + b"5]}",
    "lists": b'{"prompt": [' + b"[]," * MANY + b"[]]}",
    "objects": b'{"metadata": [' + b"{}," * MANY + b"{}]}",
    "keys": b"{" + b'"":1,' * MANY + b'"prompt":"x"}',
    "invalid JSON": b"," * MANY,
    "after a text": b'{"prompt": "' + b"a, " * 1000 + b'", "stop": [' + b"1," * MANY + b"1]}",
}


@pytest.mark.parametrize("path", PATHS)
def test_invalid_json(app: AbusedApp, path: str) -> None:
    for body in NOT_JSON:
        error = assert_refused(app.post(path, content=body))
        assert error["code"] in ("invalid_json", "invalid_value", "missing_required_parameter", "unknown_parameter")


@pytest.mark.parametrize("path", PATHS)
def test_json_that_is_not_an_object(app: AbusedApp, path: str) -> None:
    for body in NO_OBJECTS:
        assert_refused(app.post(path, content=body), 400, says="must be a JSON object")


def test_too_deep_or_too_large(server: AbusedServer) -> None:
    """On a running server, where a parser could overflow the stack."""
    for body in TOO_MUCH:
        assert server.post(COMPLETIONS, content=body).status_code == 400, short(body)


@pytest.mark.parametrize("name", MANY_VALUES)
def test_too_many_values(app: AbusedApp, name: str) -> None:
    assert_refused(app.post(COMPLETIONS, content=MANY_VALUES[name]), 400, says="request body has too many values")


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
    response = app.complete(**{f"field_{i}": i for i in range(100_000)})
    assert response.headers["x-quire-ignored-fields"] == ",".join(f"field_{i}" for i in range(16))
    for i in range(400):
        app.complete(**{f"other_{i}": i})
    assert sum(record.levelname == "WARNING" for record in caplog.records) <= 257


VALUES: list[Any] = [
    *(True, False, 0, 1, -1, 7, 2**31, 2**63, 2**70, 10**309, -(10**400), 0.5, -0.0, 1e308, "", "x", "1", "true"),
    *("\x00", "😀", "é" * 300),
    *([], [[]], [None], [True], [5, "x"], ["x", 5], [{}], [[5]], [1e9], {}, {"": None}, {"type": "x"}),
    {"a": {"b": []}},
    *({"type": ["function"]}, {"json": {"type": 7}}, [["x"] * 50] * 50, {"5": {"5": 5}}, [-1], ["x" * 5000]),
]


def names(path: str) -> list[str]:
    if path == COMPLETIONS:
        return sorted({*CompletionBody.__struct_fields__, *SAMPLING_FIELDS})
    if path == CHAT:
        return sorted({*ChatBody.__struct_fields__, *SAMPLING_FIELDS})
    if path in POOLING:
        return sorted(POOLING[path][0].__struct_fields__)
    return sorted(TokenizeBody.__struct_fields__) if path == "/tokenize" else ["model", "tokens"]


# If two fields contradict each other, the error may name either.
NEIGHBOURS = (
    "messages",
    "prompt",
    "logprobs",
    "stream",
    "max_tokens",
    "continue_final_message",
    "ignore_eos",
    "beam_width",
    "input",
    "task",
)


@pytest.mark.parametrize("values", thinned([VALUES[place::10] for place in range(10)], keep=1), ids=range(10))
@pytest.mark.parametrize("path", PATHS)
def test_every_value_in_every_field(app: AbusedApp, path: str, values: list[Any]) -> None:
    """A refusal names the field."""
    right = {COMPLETIONS: {"prompt": [5]}, CHAT: {"messages": MESSAGES}, "/tokenize": {"prompt": "x"}}
    right |= {of: body for of, (_, body) in POOLING.items()}
    length = {"max_tokens": 1} if path in GENERATING else {"tokens": [5]} if path == "/detokenize" else {}
    for name in names(path):
        for value in values:
            response = app.post(path, {**length, **right.get(path, {}), name: value})
            assert response.status_code in (200, 400, 404, 422), (name, value)
            if response.status_code != 200:
                param = response.json()["error"]["param"]
                assert param is not None and (param.startswith(name) or param in NEIGHBOURS), (name, value, param)
