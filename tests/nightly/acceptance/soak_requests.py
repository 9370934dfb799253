"""The requests of a soak: short ones of every kind, drawn from a seed, with the expected answer of each."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

VOCABULARY = range(3, 1000)
PREFIX_LEN = 64
PREFIXES = [[3 + (17 * i + 5 * j) % 900 for j in range(PREFIX_LEN)] for i in range(8)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LEAVES = ("before the body's end", "at once", "in the answer")


class SoakRequest(NamedTuple):
    """``statuses``: expected ones. ``leaves``: when the client disconnects; empty if it stays."""

    kind: str
    path: str
    body: bytes
    statuses: tuple[int, ...]
    streamed: bool = False
    leaves: str = ""


def draw_request(draw: random.Random) -> SoakRequest:
    """Draw a request of one kind by the kinds' shares."""
    maker = draw.choices(list(_SHARES), list(_SHARES.values()))[0]
    return maker(draw)


def _made(kind: str, draw: random.Random, **fields: Any) -> SoakRequest:
    body = {
        "prompt": draw.choices(VOCABULARY, k=draw.randint(2, 40)),
        "max_tokens": draw.randint(1, 8),
        "temperature": draw.choice((0, 0.8)),
        "seed": draw.getrandbits(31),
        **fields,
    }
    return SoakRequest(kind, "/v1/completions", json.dumps(body).encode(), (200,), bool(fields.get("stream")))


def _plain(draw: random.Random) -> SoakRequest:
    return _made("plain", draw, top_p=0.9, repetition_penalty=1.1)


def _streamed(draw: random.Random) -> SoakRequest:
    return _made("streamed", draw, stream=True)


def _shared(draw: random.Random) -> SoakRequest:
    prompt = [*draw.choice(PREFIXES), *draw.choices(VOCABULARY, k=draw.randint(1, 20))]
    return _made("shared prefix", draw, prompt=prompt, stream=draw.random() < 0.5)


def _several(draw: random.Random) -> SoakRequest:
    return _made("several answers", draw, n=draw.randint(2, 4), logprobs=2, stop=["\n", "end"])


def _grammar(draw: random.Random) -> SoakRequest:
    """A few grammars repeat and are found compiled; some are new."""
    wanted: dict[str, Any] = draw.choice(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"structured_outputs": {"choice": ["one", "two", "three"]}},
            {"structured_outputs": {"regex": "[0-9]{1,3}"}},
            {"structured_outputs": {"regex": f"[a-c]{{1,{draw.randint(1, 2000)}}}"}},
        )
    )
    return _made("grammar", draw, **wanted)


def _chat(draw: random.Random) -> SoakRequest:
    body = {"messages": [{"role": "user", "content": f"Count to {draw.randint(1, 99)}."}], "max_tokens": 4}
    return SoakRequest("chat", "/v1/chat/completions", json.dumps(body).encode(), (200,))


def _wrong(draw: random.Random) -> SoakRequest:
    """Invalid requests, rejected while parsed or by the scheduler."""
    bad = draw.choice(
        (
            {"n": 0},
            {"temperature": 3},
            {"prompt": [2**31]},
            {"suffix": "end"},
            {"max_tokens": 10**6},
            {"structured_outputs": {"regex": "("}},
            {"logit_bias": {"999999": 1}},
        )
    )
    if draw.random() < 0.2:
        return SoakRequest("wrong", "/v1/completions", b'{"prompt": [1, 2', (400,))
    return _made("wrong", draw, **bad)._replace(statuses=(400,))


def _leaving(draw: random.Random) -> SoakRequest:
    """The client disconnects before its answer is complete."""
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "stream": draw.random() < 0.5}
    if draw.random() < 0.3:
        fields["n"] = 3
    made = _made("left", draw, **fields)
    return made._replace(leaves=draw.choice(LEAVES if made.streamed else LEAVES[:2]))


_SHARES: dict[Callable[[random.Random], SoakRequest], float] = {
    _plain: 0.30,
    _streamed: 0.20,
    _shared: 0.15,
    _several: 0.05,
    _grammar: 0.10,
    _chat: 0.05,
    _wrong: 0.08,
    _leaving: 0.07,
}
