"""Request bodies with seeded mutations of their structure and of their bytes."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from abuse import CHAT, COMPLETIONS

from quire.frontend.http.schema.bodies import SAMPLING_FIELDS, ChatBody, CompletionBody
from quire.frontend.http.schema.pooling_bodies import EmbeddingBody, RerankBody, ScoreBody

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "y"]}, "c": {"type": "array"}},
    "required": ["a"],
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count from 1 to 3."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
# A correct body of each kind.
RIGHT: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"model": "quire-demo", "prompt": "Once upon", "max_tokens": 4, "temperature": 0.5, "seed": 3}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stop": ["x", "yz"], "top_k": 5, "top_p": 0.9}),
    (COMPLETIONS, {"prompt": [[5], [6]], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "logit_bias": {"5": 1, "6": -100}, "min_p": 0.1, "min_tokens": 2}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "allowed_token_ids": [5, 6], "bad_words": ["x"], "priority": 1}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 9, "repetition_detection": {"max_pattern_size": 3, "min_count": 2}}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[a-c]{1,3}"}, "cache_salt": "x"}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 4, "presence_penalty": 1, "frequency_penalty": -1, "extra_args": {"a": 1}},
    ),
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 3, "stream": True, "metadata": {"a": "b"}, "user": "x"}),
    (
        CHAT,
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "1"}],
            "continue_final_message": True,
            "max_tokens": 2,
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 8, "tools": [TOOL], "tool_choice": "required"}),
    (
        CHAT,
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
            ],
            "max_tokens": 8,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "max_tokens": 8,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        },
    ),
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/embeddings", {"model": "quire-demo", "input": "hello world", "encoding_format": "base64", "user": "x"}),
    ("/v1/embeddings", {"input": ["a", "b c"], "dimensions": 8, "truncate_prompt_tokens": -1, "normalize": False}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "truncate_prompt_tokens": 1, "truncation_side": "left", "priority": 1}),
    ("/v1/embeddings", {"messages": MESSAGES, "add_generation_prompt": True, "cache_salt": "x"}),
    ("/v1/embeddings", {"input": ["a"] * 70, "add_special_tokens": False}),
    ("/pooling", {"input": [5, 6, 7], "task": "token_embed", "use_activation": False}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c d"], "truncate_prompt_tokens": 4}),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/tokenize", {"prompt": "hello world", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 700]}),
)
BODIES = (CompletionBody, ChatBody, EmbeddingBody, ScoreBody, RerankBody)
FIELDS = sorted({*SAMPLING_FIELDS, *(name for body in BODIES for name in body.__struct_fields__)})
NUMBERS = (0, 1, -1, 2, 127, 128, 129, 1023, 1024, 1025, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 2**70)
NUMBERS += (10**309, -(10**400))
NUMBERS_TOO = (0.5, -0.0, 1.0, 1e-300, 1e300, 1.5, -2.5, 100.0, 0.1)
TEXTS = (
    *("", " ", "\x00", "\n", "😀", "👩‍👩‍👧", "\u202e", "\ufffd", "\ud7ff", "é", "e\u0301", "\U0010ffff", "<|im_end|>"),
    *("\ue0f0", "'", '"'),
    *("\\", "{{ 1 }}", "{% x %}", "null", "true", "NaN", "-1", "5", "__class__", "%s", "$ref", "#/x", "(a+)+$"),
    ".{1,1000}",
    *("auto", "none", "required", "function", "text", "json_schema", "json_object", "user", "assistant", "tool"),
    "system",
)
# Text that is not valid JSON, or that is easily misread.
TOKENS = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-", b"+1", b".5", b"01", b"0x1", b"1" * 5000, b"1e" + b"9" * 300),
    *(b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800", b"\\u0000", b"\x00", b"\xef\xbb\xbf", b"'"),
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"[" * 2000, b'{"a":' * 2000, b"/**/"),
    b"\r\n",
)


@dataclass(frozen=True)
class Case:
    """One request. ``how``: the kinds of mutation that were applied."""

    path: str
    content: bytes
    how: tuple[str, ...]


def make_case(seed: str) -> Case:
    """Return the case of a seed: a correct body with one to four mutations; one in four also has its bytes changed."""
    chance = random.Random(seed)
    path, right = chance.choice(RIGHT)
    body = copy.deepcopy(right)
    how: list[str] = []
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 4))):
        mutate = chance.choice(STRUCTURAL)
        mutate(body, chance)
        how.append(mutate.__name__.strip("_"))
    _bound(body, path)
    content = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    if chance.random() < 0.15:
        content = _twice(content, chance)
        how.append("twice")
    if chance.random() < 0.25:
        for _ in range(chance.randint(1, 3)):
            content = _bytes(content, chance)
        how.append("bytes")
    return Case(path, content, tuple(how))


def _bound(body: dict[str, Any], path: str) -> None:
    """Shorten values that would be accepted and then take long, so that many cases are tried."""
    if path not in (COMPLETIONS, CHAT):
        return
    most = body.get("max_tokens")
    if most is None or (type(most) is int and most > 16):
        body["max_tokens"] = 4
    if type(body.get("max_completion_tokens")) is int and body["max_completion_tokens"] > 16:
        body["max_completion_tokens"] = 4


# ---- structure


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Yield every (container, key or index) within a JSON value."""
    found: list[tuple[Any, Any]] = []
    for key in [*value] if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def _some_place(body: dict[str, Any], chance: random.Random) -> tuple[Any, Any] | None:
    places = _places(body)
    return chance.choice(places) if places else None


def _some_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(8 if depth < 3 else 5)
    match kind:
        case 0:
            return chance.choice((None, True, False))
        case 1:
            return chance.choice(NUMBERS)
        case 2:
            return chance.choice(NUMBERS_TOO)
        case 3:
            return chance.choice(TEXTS)
        case 4:
            return chance.choice(TEXTS) * chance.choice((1, 2, 60, 1030, 9000))
        case 5:
            return [_some_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case 6:
            return {chance.choice(TEXTS): _some_value(chance, depth + 1) for _ in range(chance.randrange(4))}
        case _:
            return _nested(chance)


def _nested(chance: random.Random) -> Any:
    value: Any = chance.choice((None, 1, "x", {}))
    for _ in range(chance.choice((5, 50, 150))):  # four of them, one inside the other, can still be written
        value = [value] if chance.random() < 0.5 else {"items": value}
    return value


def _replace(body: dict[str, Any], chance: random.Random) -> None:
    place = _some_place(body, chance)
    if place is not None:
        place[0][place[1]] = _some_value(chance)


def _delete(body: dict[str, Any], chance: random.Random) -> None:
    place = _some_place(body, chance)
    if place is not None:
        del place[0][place[1]]


def _wrap(body: dict[str, Any], chance: random.Random) -> None:
    place = _some_place(body, chance)
    if place is not None:
        inner = place[0][place[1]]
        place[0][place[1]] = [inner] if chance.random() < 0.5 else {chance.choice(TEXTS): inner}


def _rename(body: dict[str, Any], chance: random.Random) -> None:
    place = _some_place(body, chance)
    if place is not None and isinstance(place[0], dict):
        place[0][chance.choice((*TEXTS, *FIELDS))] = place[0].pop(place[1])


def _add_field(body: dict[str, Any], chance: random.Random) -> None:
    body[chance.choice(FIELDS)] = _some_value(chance)


def _merge(body: dict[str, Any], chance: random.Random) -> None:
    """Add fields of another correct body: each is valid alone, but the combination may not be."""
    _, other = chance.choice(RIGHT)
    for name in other:
        if chance.random() < 0.6:
            body[name] = copy.deepcopy(other[name])


def _lengthen(body: dict[str, Any], chance: random.Random) -> None:
    place = _some_place(body, chance)
    if place is None:
        return
    value = place[0][place[1]]
    if isinstance(value, list | str):
        place[0][place[1]] = value * chance.choice((2, 20, 129, 1025, 2049))


def _spoil_text(body: dict[str, Any], chance: random.Random) -> None:
    places = [(where, key) for where, key in _places(body) if isinstance(where[key], str)]
    if places:
        where, key = chance.choice(places)
        cut = chance.randint(0, len(where[key]))
        where[key] = where[key][:cut] + chance.choice(TEXTS) + where[key][cut:]


STRUCTURAL: tuple[Callable[[dict[str, Any], random.Random], None], ...] = (
    *(_replace, _replace, _replace, _delete, _wrap, _rename, _add_field, _add_field, _merge, _lengthen, _spoil_text),
)


# ---- bytes


def _twice(content: bytes, chance: random.Random) -> bytes:
    """Repeat a field with another value."""
    name, value = chance.choice(FIELDS), json.dumps(_some_value(chance)).encode("utf-8", "surrogatepass")
    at = content.rfind(b"}")
    return content[:at] + b', "%b": %b' % (name.encode(), value) + content[at:]


def _bytes(content: bytes, chance: random.Random) -> bytes:
    at = chance.randint(0, len(content))
    length = chance.choice((0, 1, 2, 10))
    match chance.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + max(length, 1) :]
        case 2:
            return content[:at] + chance.choice(TOKENS) + content[at + length :]
        case 3:
            return content[:at] + chance.randbytes(max(length, 1)) + content[at:]
        case 4:
            return content + content[at:]
        case _:
            flipped = bytearray(content)
            if flipped:
                flipped[at % len(flipped)] ^= 1 << chance.randrange(8)
            return bytes(flipped)
