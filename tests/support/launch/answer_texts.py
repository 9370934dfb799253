"""Random texts in the formats of answers: thoughts, content and calls, whole and damaged."""

import json
import random
from collections.abc import Callable
from typing import Any

WORDS = ("a", "Hi there", "x < y", "\n", "  ", "{", "}", '"', "\\", "é", "文", "<", "</", "to=", "1", ";", "\n\n", "]")
KEYS = ("a", "city", "n", "on", "list")
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"n": {"type": "integer"}, "on": {"type": "boolean"}, "city": {"type": "string"}},
    "get-it": {"list": {"type": ["array", "null"]}, "n": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
    "g_1": {},
}
Call = tuple[str, dict[str, Any]]


def _words(rng: random.Random, most: int = 5) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind == 4:
        return [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 5:
        return {rng.choice(KEYS): _value(rng, depth + 1) for _ in range(rng.randint(0, 2))}
    return (_words(rng), rng.randint(-9, 10**6), rng.choice((True, False, None)), rng.random())[kind]


def _call(rng: random.Random) -> Call:
    return rng.choice(list(TOOLS)), {rng.choice(KEYS): _value(rng) for _ in range(rng.randint(0, 3))}


def _dumps(rng: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=rng.random() < 0.2, indent=rng.choice((None, None, 1)))


def _object(rng: random.Random, call: Call, key: str = "arguments") -> str:
    pairs = [("name", call[0]), (key, call[1])]
    if rng.random() < 0.1:
        pairs.reverse()
    if rng.random() < 0.1:
        pairs[1] = (key, json.dumps(call[1]))
    return _dumps(rng, dict(pairs))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _hermes(rng: random.Random, calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(rng, call)}\n</tool_call>" for call in calls)


def _qwen3_coder(rng: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        body = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        outer = ("<tool_call>\n", "\n</tool_call>") if rng.random() < 0.8 else ("", "")
        return f"{outer[0]}<function={name}>\n{body}</function>{outer[1]}"

    return "\n".join(one(*call) for call in calls)


def _glm(rng: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _llama3(rng: random.Random, calls: list[Call]) -> str:
    tag = "<|python_tag|>" if rng.random() < 0.3 else ""
    return tag + "; ".join(_object(rng, call, "parameters") for call in calls)


def _mistral(rng: random.Random, calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumps(rng, arguments)}" for name, arguments in calls)


def _mistral_list(rng: random.Random, calls: list[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(_object(rng, call) for call in calls)}]"


def _harmony(rng: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        header = rng.choice(
            (
                f"<|channel|>commentary to=functions.{name} <|constrain|>json",
                f" to=functions.{name}<|channel|>commentary json",
            )
        )
        return f"<|start|>assistant{header}<|message|>{_dumps(rng, arguments)}<|call|>"

    return "".join(one(*call) for call in calls)


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _gemma(rng: random.Random, calls: list[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


def _deepseek(form: str) -> Callable[[random.Random, list[Call]], str]:
    def write(rng: random.Random, calls: list[Call]) -> str:
        each = (form.format(name, _dumps(rng, arguments)) for name, arguments in calls)
        inside = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in each)
        return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"

    return write


WRITERS: dict[str, Callable[[random.Random, list[Call]], str]] = {
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>{}\n```json\n{}\n```"),
    "deepseek_v31": _deepseek("{}<｜tool▁sep｜>{}"),
    "gemma4": _gemma,
    "glm45": _glm,
    "harmony": _harmony,
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "mistral_list": _mistral_list,
    "qwen3_coder": _qwen3_coder,
}
THOUGHTS = {"harmony": "<|channel|>analysis<|message|>{}<|end|>", "gemma4": "<|channel>thought\n{}<channel|>"}
CONTENT = {"harmony": "<|start|>assistant<|channel|>final<|message|>{}<|return|>"}


def answer_text(name: str, rng: random.Random, *, is_whole: bool = False) -> str:
    """Return a random answer in the format ``name``; every second one is damaged, unless all must be whole."""
    parts = []
    if rng.random() < 0.5:
        parts.append(THOUGHTS.get(name, "<think>\n{}\n</think>\n\n").format(_words(rng)))
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            parts.append(CONTENT.get(name, "{}").format(_words(rng)))
        else:
            parts.append(WRITERS[name](rng, [_call(rng) for _ in range(rng.randint(1, 3))]))
    text = "".join(parts)
    for _ in range(rng.randint(1, 3) if not is_whole and rng.random() < 0.5 else 0):
        text = _damaged(text, rng)
    return text


def _damaged(text: str, rng: random.Random) -> str:
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.randint(0, 12))
    kind = rng.randrange(5)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:]
    if kind == 2:
        return text[:start]
    if kind == 3:
        return text[:start] + rng.choice(WORDS) + text[start:]
    place = rng.randint(0, len(text))
    return text[:place] + text[start:end] + text[place:]


def split(text: str, rng: random.Random) -> list[str]:
    """Return the text in random pieces, some of them empty."""
    most = rng.choice((1, 2, 5, 20, 200))
    pieces, at = [], 0
    while at < len(text):
        size = rng.randint(0 if most > 1 else 1, most)
        pieces.append(text[at : at + size])
        at += size
    return pieces
