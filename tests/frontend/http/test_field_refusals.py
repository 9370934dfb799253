"""Every refusal of a field, at the parser: one table of values, each refused with its field, range and value.

Over HTTP there is one case per status (test_http_refusals.py); values that reach the engine are in tests/abuse.
"""

import contextlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from abuse import INTERNALS
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pooled_vectors import BOTH
from tiers import examples

from quire.frontend.http.routes import tokens
from quire.frontend.http.schema import bodies, schema
from quire.frontend.http.schema.errors import ErrorDetail, as_api_error
from quire.frontend.http.schema.pooling_bodies import EmbeddingBody, RerankBody, ScoreBody
from quire.frontend.http.schema.pooling_requests import PoolingParser
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.serving.body import MAX_BODY_WEIGHT, parse_body
from quire.frontend.text.pooling.inputs import InputEncoder
from quire.frontend.text.prompts import encode_prompt, tokenize_bad_words
from quire.protocol.errors import InvalidRequest

VOCAB, CONTEXT = 420, 256
USER = {"role": "user", "content": "hello"}
MESSAGES = [USER]
IDS_RANGE = f"prompt must hold token ids, integers from 0 to {VOCAB - 1}"
NO_NUMBERS = (
    *('""', '"2"', '"1e3"', '"hot"', '"NaN"', '"null"', "true", "false", "[]", "[1]", "[[]]", "{}", '{"a": 1}'),
    *('"\\u0000"', '"\\u0661"', "NaN", "Infinity", "-Infinity", "1e999", "-1e999"),
)
NO_INTEGERS = ("1.5", "0.1", "1e-7", "5e-324", "1e400", "-2.5")
HUGE = (2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**65, 2**70, 2**128, 10**40)
HUGE += (10**308, 2**1024, 10**309, 10**400, 10**4000)  # larger than any float


@dataclass(frozen=True)
class Range:
    """A field whose value is a number from ``low`` to ``high``; ``open_low``: low itself is refused.

    Attributes:
        says: the expected error message without the value that it repeats.
        beside: other fields that the request needs.
    """

    kind: str
    name: str
    low: float
    high: float
    says: str
    integer: bool = True
    open_low: bool = False
    beside: str = ""

    def body(self, value: str) -> bytes:
        prompt = '"prompt": [5, 6]' if self.kind == "completion" else f'"messages": {json.dumps(MESSAGES)}'
        return f'{{{prompt}{self.beside}, "{self.name}": {value}}}'.encode()

    def outside(self) -> list[str]:
        """Return JSON texts of values that must be refused."""
        found = [*NO_NUMBERS, *(NO_INTEGERS if self.integer else ())]
        for value in (*HUGE, *(-value for value in HUGE), -1, 0):
            if not self.low <= value <= self.high:
                found.append(str(value))
        step: float = 1 if self.integer else 1e-9
        found += [repr(self.low - step), repr(self.high + step)]
        if self.open_low:
            found += [repr(self.low), "-0.0", "0", "1e-400"]
        return found


def integer(kind: str, name: str, low: int, high: int, beside: str = "") -> Range:
    return Range(kind, name, low, high, f"{name} must be an integer from {low} to {high}", beside=beside)


def real(name: str, low: float, high: float, *, open_low: bool = False) -> Range:
    edge = f"above {low:g} and at most" if open_low else f"from {low:g} to"
    says = f"{name} must be a number {edge} {high:g}"
    return Range("completion", name, low, high, says, integer=False, open_low=open_low)


RANGES = [
    integer("completion", "n", 1, 128),
    integer("chat", "n", 1, 128),
    integer("completion", "best_of", 1, 128),
    integer("completion", "max_tokens", 1, CONTEXT),
    integer("chat", "max_tokens", 1, CONTEXT),
    integer("chat", "max_completion_tokens", 1, CONTEXT),
    integer("completion", "min_tokens", 0, 2**31 - 1),
    integer("completion", "top_k", -1, 2**31 - 1),
    integer("completion", "logprobs", 0, 20),
    integer("completion", "prompt_logprobs", 0, 20),
    integer("chat", "top_logprobs", 0, 20, beside=', "logprobs": true'),
    integer("completion", "seed", -(2**63), 2**64 - 1),
    integer("completion", "priority", -(2**31), 2**31 - 1),
    integer("completion", "thinking_token_budget", 0, 2**31 - 1),
    real("temperature", 0, 2),
    real("top_p", 0, 1, open_low=True),
    real("min_p", 0, 1),
    real("presence_penalty", -2, 2),
    real("frequency_penalty", -2, 2),
    real("repetition_penalty", 0.01, 10),
]

# (field, value, part of the error message)
SHARED = [
    ("max_tokens", 257, "integer from 1 to 256 (got 257): this model's " + "maximum context length"),
    ("stop", [""], "stop must be a string of 1 to 1024"),
    ("stop", ["x"] * 10_000, "at most 64 strings"),
    ("stop_token_ids", [3, VOCAB], f"integers from 0 to {VOCAB - 1}"),
    ("stop_token_ids", [-1], "stop_token_ids must be a"),
    ("stop_token_ids", [1] * 2000, "at most 1024"),
    *[("ignore_eos", value, "ignore_eos must be true or false") for value in (1, "yes")],
    ("skip_special_tokens", 0, "must be true or false"),
    ("include_stop_str_in_output", "no", "must be true or false"),
    ("stream", "true", "stream must be true or false"),
    ("stream_options", {"include_usage": True}, "only allowed when stream is true"),
    ("cache_salt", "", "string of 1 to 1024 characters"),
    ("model", 7, "model must be a string"),
    ("logit_bias", {"5": 1, "420": 1}, "(got '420')"),
    ("logit_bias", {"7": 101}, "logit_bias of token 7 must be a number"),
    ("logit_bias", [1], "logit_bias must be an object"),
    *[("allowed_token_ids", value, f"0 to {VOCAB - 1}") for value in ([VOCAB], [3, 2**31 - 1])],
    *[("allowed_token_ids", value, "list of 1 to 65536 token ids") for value in ([], [-1], [1.5], ["a"], 7, [True])],
    ("allowed_token_ids", [5] * 100_000, "list of 1 to 65536 token ids"),
    ("allowed_token_ids", [5, 6, 5], "more than once"),
    *[("bad_words", value, "string of 1 to 256 characters") for value in ([""], [7], ["x" * 257])],
    *[("bad_words", value, "at most 1024 strings") for value in ("word", ["x"] * 100_000, {})],
    ("bad_words", ["ж" * 250], "from 1 to 256 tokens long"),
    *[("structured_outputs", value, "exactly one of json, regex") for value in ({}, {"json": {}, "regex": "a"})],
    ("structured_outputs", {"json_object": False}, "exactly one of"),
    ("structured_outputs", {"regex": ""}, "structured_outputs.regex must be a non-empty string"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice must be a list"),
    ("structured_outputs", {"choice": [1]}, "structured_outputs.choice must be a list"),
    ("structured_outputs", {"json": [1]}, "structured_outputs.json must be a non-empty string"),
    ("structured_outputs", {"grammar": "x" * 600_000}, "at most 524288 bytes"),
    *[("structured_outputs", value, "structured_outputs must be an object") for value in ("json", 7, [])],
    *[("repetition_detection", value, "must have max_pattern_size") for value in ({}, {"min_count": 3})],
    ("repetition_detection", {"max_pattern_size": 0}, "repetition_detection.max_pattern_size must be an integer"),
    ("repetition_detection", {"max_pattern_size": 5, "min_count": 1}, "repetition_detection.min_count must be"),
    ("repetition_detection", {"max_pattern_size": 5, "min_pattern_size": 6}, "from 1 to 5"),
    ("repetition_detection", 7, "repetition_detection must be an object"),
    *[("extra_args", value, "extra_args must be an object") for value in (7, {"a": {"b": 1}}, {"a": "x" * 70_000})],
    ("vllm_xargs", [], "vllm_xargs must be an object"),
    ("vllm_xargs", {"a": {}}, "extra_args must be an object of strings"),
    ("response_format", "json", "response_format must be an object"),
    ("user", 7, "user must be a string"),
]
NESTED = [
    ("response_format", {"type": "xml"}, "response_format.type", "one of text, json_object, json_schema"),
    ("response_format", {}, "response_format.type", "one of text"),
    (
        "response_format",
        {"type": "text", "json_schema": {}},
        "response_format.json_schema",
        "needs response_format.type json_schema",
    ),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema", "must be an object"),
    *[
        ("response_format", {"type": "json_schema", "json_schema": value}, f"response_format.json_schema.{at}", says)
        for value, at, says in (
            ({}, "name", "1 to 128 letters"),
            ({"name": "a b", "schema": {}}, "name", "1 to 128 letters"),
            ({"name": "a"}, "schema", "must be an object"),
            ({"name": "a", "schema": {}, "strict": 1}, "strict", "true or false"),
            ({"name": "a", "schema": {"enum": ["x" * 600_000]}}, "schema", "at most 524288 bytes"),
        )
    ],
]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = [
    ({"tools": [7]}, "tools", "tools must be a list of objects"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128 tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "must be function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name", "1 to 128 letters"),
    ({"tools": [TOOL, {"type": "function", "function": {"name": "é"}}]}, "tools[1].function.name", "1 to 128"),
    ({"tools": [{**TOOL, "function": {**FUNCTION, "parameters": []}}]}, "tools[0].function.parameters", "an object"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "duplicate function name f"),
    ({"tools": [{**TOOL, "function": {**FUNCTION, "description": "x" * 600_000}}]}, "tools", "at most 524288 bytes"),
    *[({"tools": [TOOL], "tool_choice": value}, "tool_choice", "must be none, auto") for value in (7, "f", {}, [])],
    *[({"tool_choice": value}, "tool_choice", "requires tools") for value in ("required", {"type": "function"})],
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "'g' not found in tools",
    ),
    *[
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": given}},
            },
            f"tool_choice.allowed_tools{at}",
            says,
        )
        for given, at, says in (
            ([TOOL] * 129, "", "(1 to 128 tools)"),
            ([TOOL, {**TOOL, "function": {"name": "g"}}], ".tools[1]", "must name one of tools (got 'g')"),
        )
    ],
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
    (
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "cannot be combined with a tool_choice",
    ),
]
COMPLETION = [
    *[("prompt", value, IDS_RANGE) for value in ([VOCAB], [-1], [1, 2.0], [1, True], [1, "a"], [1, None], [{}])],
    *[("prompt", value, "must not be empty") for value in ("", [], [""], ["x", ""])],
    ("prompt", [[]], "at least one token"),
    *[("prompt", value, "prompt must be a string, a list of token ids") for value in (7, {}, True)],
    *[("prompt", value, "either strings or lists") for value in (["a", [1]], [[1], "a"], ["a", 1])],
    ("prompt", ["a"] * 2049, "at most 2048 prompts"),
    ("prompt", None, "prompt is required"),
    ("echo", 1, "echo must be true or false"),
    ("suffix", 7, "suffix is not supported: write the whole prompt"),
    ("add_special_tokens", 1, "add_special_tokens must be true or false"),
]
CHAT = [
    *[("messages", value, "messages must be a list of at least one message") for value in ([], "x", 7, {})],
    ("messages", None, "messages is required"),
    ("top_logprobs", 3, "top_logprobs needs logprobs to be true"),
    ("logprobs", 1, "logprobs must be true or false"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs must not set messages"),
    ("chat_template_kwargs", {"tokenize": True}, "chat_template_kwargs must not set tokenize"),
    ("chat_template_kwargs", [], "must be an object"),
    ("chat_template", "{{ 1 }}", "chat_template is not supported: start the server with --chat-template"),
    ("functions", [{"name": "f"}], "functions is not supported: use tools and tool_choice"),
    ("function_call", {"name": "f"}, "function_call is not supported: use tools and tool_choice"),
    ("audio", {"voice": "x"}, "audio is not supported: this server writes text only"),
    ("web_search_options", {"x": 1}, "web_search_options is not supported: search in the client"),
    ("structural_tag", {"type": "object"}, "structural_tag is not supported: use structured_outputs"),
    ("reasoning_effort", "maximal", "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max"),
    ("reasoning_effort", "\ud800", "reasoning_effort must be one of none, minimal, low, medium, high, xhigh, max"),
    ("metadata", [], "metadata must be an object"),
    ("store", "x", "store must be true or false"),
    *[("modalities", value, "this server writes text only") for value in ("text", ["text", "audio"], 7)],
]

# ---- values of which the message says less: (fields, or the values of one, and the beginning of the error's field)

INVALID_STOPS: list[Any] = [
    *("", [""], ["x", ""], [None], ["x", None], [5], ["x", 5], [True], [["x"]], [{}], {}, {"a": "x"}, 5, 1.5, True),
    False,
    *(["x"] * 65, ["x"] * 10_000, [""] * 10_000, "x" * 1025, "x" * 10**6, ["x", "y" * 1025], ["😀" * 1025]),
    *(["x" * 1024] * 9, ["x" * 200] * 64, [chr(0x4E00 + i) * 1024 for i in range(64)], ["a" * 1024] * 64),
]
INVALID_BAD_WORDS: list[Any] = [
    *("", "x", [""], ["x", ""], [None], [5], [True], [["x"]], [{}], {}, 5, 1.5, True, ["x" * 257], ["x", "y" * 10**6]),
    *(["x"] * 1025, ["x"] * 100_000, ["ж" * 250], ["\u0301" * 256], ["😀" * 100], [[5]], [[1024]], ["x", 5, "y"]),
]
BIAS_KEYS = (
    *(str(VOCAB), str(2**31), str(2**40), str(2**64), str(10**400), "-1", "-0", "+5", "05", "0x5", "5.0", "5e0", " 5"),
    *("5 ", "5\n", "", "abc", "²", "٣", "５", "1_000", "None", "NaN", "\x00", "😀", "5,6", "__class__"),
)
BIAS_VALUES = ("101", "-101", "1e9", "-1e9", "1e308", "1e999", "NaN", "Infinity", "-Infinity", '"5"', "true", "null")
BIAS_VALUES += ("[]", "[1]", "{}", "100.0000001", "-100.0000001", str(2**63), str(-(2**70)), '"x"', "false")
BIAS_VALUES += (str(10**309), str(-(10**400)))
REPETITIONS: list[tuple[Any, str]] = [
    *[({"max_pattern_size": value}, "max_pattern_size") for value in (0, -1, 1.5, "2", True, [], 2**31, 2**70)],
    *[({"max_pattern_size": 5, "min_pattern_size": v}, "min_pattern_size") for v in (0, -1, 6, 1.5, "2", True, 2**70)],
    *[({"max_pattern_size": 5, "min_count": v}, "min_count") for v in (1, 0, -1, 1.5, "2", True, 2**70)],
    *[(value, "repetition_detection") for value in ([], [1], 7, "x", True, {}, {"min_count": 2})],
]
MODELS = (
    *("../../etc", "..\\..\\x", "/", "//", "quire-demo ", " quire-demo", "Quire-Demo", "quire-demo\n"),
    "quire-demo\x00",
    *("quire-demo:lora", "quire-demo/../x", "lora/x", "file:///x", "http://x/y", "a\nb\x1b[31mred", "\x1b]0;t\x07"),
    "m" * 10**6,
    *('a"b', "a\\", "{model}", "%s%n", "$(id)", "`id`", "\u202egnp", "😀" * 1000, "', 'x", "\r\nx-a: b", "None"),
    "null",
)
NO_NAMES: tuple[Any, ...] = (0, 1, True, False, 1.5, [], ["quire-demo"], {}, {"id": "quire-demo"})
SALTS: tuple[Any, ...] = ("", "x" * 1025, "x" * 10**6, "é" * 1025, 0, 5, True, 1.5, [], ["x"], {}, {"salt": "x"})
JOBS: tuple[Any, ...] = (
    "",
    "x" * 257,
    "x" * 10**6,
    "é" * 257,
    "a\nb",
    "\x00",
    "\x1b[31m",
    "\x7f",
    "a\x85",
    "\r\n",
    "\t",
)
JOBS += (0, 5, -1, True, 1.5, [], ["x"], {}, {"id": "x"})
JOB_FIELDS = ("job_id", "nvext.agent_context.session_id", "nvext.agent_context.trajectory_id")
INVALID_PROMPTS: list[Any] = [
    *(None, "", [], [[]], [""], ["x", ""], [[5], []], ["x", None], ["x", 5], [[5], "x"], ["x", ["x"]], [5, "x"]),
    [5, [5]],
    *({}, {"prompt": "x"}, [{}], [{"text": "x"}], 0, 5, -1, 1.5, True, False, [None], [True], [1.0], [[1.0]], [[[5]]]),
    *([["x"]], [[5], [5.0]], [[5], [-1]], [[5], [1024]], ["x"] * 2049, [[5]] * 5000, [""] * 2048),
]
INVALID_CONVERSATIONS: list[Any] = [
    *(None, [], "x", "", {}, USER, 5, True, [[]], [None], ["hello"], [5], [[USER]], [{}]),
    *(0, 1.5, False, [0], [True], [""], [USER, None]),
    [USER] * 8193,
]
NO_MESSAGES: list[Any] = [
    *(None, [], "x", 5, True, {}, {"role": "user"}, {"content": "x"}, {"role": "", "content": "x"}),
    *(
        {"role": role, "content": "x"}
        for role in ("User", "USER", "user ", "user\n", "root", "ｕser", "", None, 5, ["user"], {})
    ),
    *({"role": "user", "content": content} for content in (None, 5, True, {}, [], [None], [5], ["x"], [[]], [{}])),
    *(
        {"role": "user", "content": [{"type": kind, "text": "x"}]}
        for kind in ("", "Text", "input_text", None, 5, [], "image")
    ),
    *({"role": "user", "content": [{"type": "text", "text": text}]} for text in (None, 5, [], {}, ["x"], True)),
    *({"role": role, "content": None} for role in ("user", "system", "function", "developer")),
    *({"role": "user", "content": "x", name: {"name": "f"}} for name in ("function_call", "audio")),
    *({"role": "user", "content": "x", name: 5} for name in ("name", "tool_call_id", "refusal", "reasoning_content")),
    *({"role": "assistant", "content": "x", "tool_calls": calls} for calls in ("x", 5, {}, [5], [None], [[]], True)),
    *(
        {"role": "assistant", "content": "x", "tool_calls": [call]}
        for call in (
            *({}, {"function": 7}, {"function": {}}, {"function": {"name": 5}}, {"function": {"name": ""}}),
            *({"id": 5, "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "f"}}),
            *({"function": {"name": "f", "arguments": value}} for value in (5, [1], True)),
        )
    ),
    {"role": "user", "content": [{"type": "text", "text": "x"}] * 50 + [5]},
]
PARTS: list[Any] = [
    *(
        {"type": kind, kind: {"url": "http://x/y"}}
        for kind in ("image_url", "video_url", "audio_url", "image", "video")
    ),
    *(
        {"type": kind, kind: {}}
        for kind in ("input_audio", "file", "image_embeds", "input_image", "audio_embeds", "pdf")
    ),
    *(
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        for data in ("UklGRg==", "", "x" * 10**6)
    ),
    *({"type": "file", "file": {name: "x"}} for name in ("file_id", "file_data", "filename")),
    *({"type": kind} for kind in (7, None, [], "", "text", "TEXT", "x" * 10**6, "image_url\n")),
    *({"type": "text", "text": text} for text in (7, None, [], {})),
    *(7, None, "x", [], {}, {"text": "x"}, {"image_url": {"url": "http://x"}}),
    {"type": "image_url", "image_url": "http://x", "text": "x"},
]
TENSOR_FIELDS = ("prompt_embeds", "inputs_embeds", "input_embeds", "mm_features", "multi_modal_data")
TENSORS: list[Any] = [
    *("gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAlpZCA+IC90bXCUhZRSlC4=", "", "x" * 10**6, "AAAA", "UEsDBBQ="),
    *(7, [], [[]], [[1.0]], [1.0] * 1000, {"data": "x"}, True, [["NaN"]], {"dtype": "float32", "shape": [2**40]}),
]
ADAPTER_FIELDS = ("lora", "lora_name", "lora_path", "lora_request", "adapter", "lora_modules")
ADAPTER_NAMES = ("x", "../../etc/passwd", "/etc/passwd", "http://x/y", "hf://a/b", "", "x" * 10**6, "a\x00b")
ADAPTERS: list[Any] = [*ADAPTER_NAMES, 7, [], {}, True]
OUTPUT_FORMS: list[Any] = [
    *({}, [], 7, "x", True, {"json": 7}, {"json": []}, {"json": ""}, {"regex": ""}, {"regex": 7}, {"regex": []}),
    *({"choice": []}, {"choice": "x"}, {"choice": [""]}, {"choice": [7]}, {"choice": ["x"] * 10_001}, {"choice": {}}),
    *({"grammar": ""}, {"grammar": 7}, {"json_object": 7}, {"json_object": "x"}, {"json_object": False}, {"nope": 1}),
    *({"choice": ["x" * 600_000]}, {"json": {"enum": ["xxxxxxxx"] * 60_000}}, {"json": None}),
]
FORMATS: list[Any] = [
    *(7, "json_object", [], True, {}, {"type": 7}, {"type": "xml"}, {"type": "json_schema"}),
    *({"type": "json_object", "json_schema": {}}, {"type": "json_schema", "json_schema": 7}, {"type": None}),
    *({"type": "json_schema", "json_schema": {"name": name, "schema": {}}} for name in ("", 7, "a b", "x" * 129, None)),
    *({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in (7, [], "x", None, True)),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 7}},
    *({"type": "json_object", name: 7} for name in ("schema", "value")),
]
PAIRS = [
    *({"json": True, name: value} for name, value in (("regex", "a"), ("choice", ["a"]), ("grammar", 'start: "a"'))),
    *({"regex": "a", name: value} for name, value in (("json_object", True), ("choice", ["a"]), ("grammar", "x"))),
    {"json": {}, "json_object": True, "regex": "a", "choice": ["a"], "grammar": 'start: "a"'},
    {"json": "{}", "grammar": 'root ::= "a"'},
    {"choice": ["a"], "grammar": 'root ::= "a"'},
    {"choice": ["a"], "json_object": True},
    *({"regex": "a", "json": schema} for schema in ({}, "{}", {"const": "a"}, False)),
    {"json_object": True, "grammar": 'start: "a"'},
    {"json_object": True, "json": {"type": "object"}},
]
KINDS: tuple[Any, ...] = (
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
)
CONSTRAINTS: tuple[Any, ...] = ({"regex": "a"}, {"json": {}}, {"choice": ["a"]}, {"grammar": 'start: "a"'})
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
BAD_KWARGS: list[tuple[Any, str]] = [
    *(({name: value}, name) for name in (*RESERVED, "chat_template") for value in (True, [], "x", {"a": 1})),
    *((value, "object") for value in (7, "x", [], [{}], True, 1.5)),
]
TEMPLATES = ("{{ 1 }}", "", "{% for i in range(99999) %}{% endfor %}", 7, [], {}, True, "x" * 10**6)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def deep_schema(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": {"a": value}}
    return value


INVALID_TOOLS: list[Any] = [
    *(7, "x", True, {}, [7], ["x"], [None], [[]], [{}], [{"type": "function"}]),
    *([{**tool(), "type": kind}] for kind in (7, "retrieval", None, [], {}, "FUNCTION", "function ", True)),
    *(
        [tool(name=name)]
        for name in ("", 7, None, "a b", "x" * 129, "x" * 10**6, "é", "a\n", "a.b", "a/b", "<|im_end|>")
    ),
    *([tool(description=text)] for text in (7, [], {}, True)),
    *([tool(strict=value)] for value in (7, "x", [], {})),
    *([tool(parameters=value)] for value in (7, "x", [], True, [{}])),
    [{"type": "function", "function": []}],
    [tool(), tool()],
    [tool(name=f"f{i}") for i in range(129)],
    [tool(name=f"f{i}") for i in range(10_000)],
    [tool(description="x" * 600_000)],
    [tool(parameters=deep_schema(300))],
]
INVALID_CHOICES: list[Any] = [
    *(7, "", "x", "AUTO", [], {}, True, {"type": "function"}, {"type": "x"}, {"type": "function", "function": {}}),
    *({"type": "function", "function": {"name": name}} for name in (7, None, "g", "", "x" * 10**6, "F", [], {})),
    *({"type": "function", "function": function} for function in ([], "f", 7, None)),
    *({"type": kind, "function": {"name": "f"}} for kind in (7, "tool", None, "")),
]


def invalid_id_lists() -> list[Any]:
    """Return lists with one invalid token id, at each position."""
    wrong: list[Any] = [VOCAB, VOCAB + 1, -1, -(2**31), 2**31 - 1, 2**31, 2**32 + 5, 2**63, 2**64, 2**70]
    wrong += [1.0, 1.5, 1e300, True, False, None, "5", "", [], [5], {}, {"a": 5}]
    chance = random.Random(0)
    lists: list[Any] = []
    for value in wrong:
        at = chance.randrange(6)
        lists.append([*range(10, 10 + at), value, *range(20, 25 - at)])
    return lists


WORDS = st.sampled_from(["type", "function", "name", "json_schema", "schema", "json", "regex", "required", "5"])
PLAIN = st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | WORDS | st.text(max_size=3)
OBJECT_FIELDS = (
    *("logit_bias", "repetition_detection", "extra_args", "vllm_xargs", "structured_outputs", "response_format"),
    *("tools", "tool_choice", "parallel_tool_calls", "stream_options"),
)
ANY_FIELDS = st.dictionaries(
    st.sampled_from([*bodies.SAMPLING_FIELDS, *OBJECT_FIELDS]),
    st.recursive(
        PLAIN, lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3), max_leaves=8
    ),
    min_size=1,
    max_size=3,
)

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
VALUES: list[Any] = [
    *(True, False, 0, 1, -1, 7, 2**31, 2**63, 2**70, 10**309, -(10**400), 0.5, -0.0, 1e308, "", "x", "1", "true"),
    *("\x00", "😀", "é" * 300),
    *([], [[]], [None], [True], [5, "x"], ["x", 5], [{}], [[5]], [1e9], {}, {"": None}, {"type": "x"}),
    {"a": {"b": []}},
    *({"type": ["function"]}, {"json": {"type": 7}}, [["x"] * 50] * 50, {"5": {"5": 5}}, [-1], ["x" * 5000]),
]
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
VALUES_OF: dict[str, Sequence[Any]] = {
    "stop": INVALID_STOPS,
    "bad_words": INVALID_BAD_WORDS,
    "cache_salt": SALTS,
    "repetition_detection": [value for value, _ in REPETITIONS],
}
BEAMS = {"use_beam_search": True, "beam_width": 2}
COMBINATIONS: list[tuple[str, dict[str, Any], str, str]] = [
    ("completion", {**BEAMS, "stream": True}, "use_beam_search", "requires stream to be false"),
    ("completion", {**BEAMS, "best_of": 2}, "best_of", "best_of must be 1 with use_beam_search (got 2)"),
    (
        "completion",
        {**BEAMS, "beam_width": 1, "session": f"sess_{'0' * 32}"},
        "use_beam_search",
        "cannot be combined with session",
    ),
    ("completion", {"structured_outputs": {"form": {}}}, "structured_outputs.form", "unknown field"),
    (
        "completion",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "cannot be combined",
    ),
    ("completion", {"extra_args": {}, "vllm_xargs": {}}, "vllm_xargs", "another name of extra_args"),
    ("completion", {"max_tokens": 0}, "max_tokens", "from 1 to 256"),
    ("completion", {"max_tokens": 4, "min_tokens": 5}, "min_tokens", "max_tokens, which is 4 (got 5)"),
    ("completion", {"min_tokens": 17}, "min_tokens", "max_tokens, which is 16 (got 17)"),
    ("chat", {"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos", "structured"),
    *(
        (kind, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "require stream to be false")
        for kind in ("completion", "chat")
    ),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "both be true"),
    ("chat", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ("chat", {"stream": True, "stream_options": 7}, "stream_options", "must be an object"),
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


BASE: dict[str, dict[str, Any]] = {
    "completion": {"prompt": [5, 6]},
    "chat": {"messages": MESSAGES},
    "embedding": {"input": [5]},
    "score": {"text_1": "x", "text_2": "y"},
    "rerank": {"query": "x", "documents": ["y"]},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [5]},
}
GENERATING = ("completion", "chat")
Parse = Callable[[str, dict[str, Any] | bytes], Any]


@pytest.fixture(scope="module")
def parse(tokenizer: Any, text_in: Any) -> Parse:
    """Return a function that reads the body of a kind of request as a server does, up to its prompts of token ids."""
    engine: Any = FakeEngine(tokenizer, max_model_len=CONTEXT, vocab_size=VOCAB)
    parser = schema.Parser(served_names=("tiny",), limits=engine)
    encoder = InputEncoder(text_in, engine, BOTH)
    pooling = PoolingParser(parser=parser, encoder=encoder)

    def completion(raw: dict[str, Any]) -> Any:
        parsed = parser.completion(raw)
        for prompt in parsed.prompts:
            encode_prompt(prompt, text_in, engine)
        return tokenize_bad_words(parsed.params, text_in, engine)

    kinds: dict[str, Callable[[dict[str, Any]], Any]] = {
        "completion": completion,
        "chat": lambda raw: tokenize_bad_words(parser.chat(raw).params, text_in, engine),
        "embedding": lambda raw: pooling.embedding(raw, "embed"),
        "score": lambda raw: pooling.score(raw, "classify"),
        "rerank": lambda raw: pooling.rerank(raw, "classify"),
        "tokenize": lambda raw: tokens._parse_tokenize(parser, raw, Ignored(parser.unknown_fields)),
        "detokenize": lambda raw: tokens._parse_detokenize(parser, raw, Ignored(parser.unknown_fields)),
    }

    def read(kind: str, given: dict[str, Any] | bytes) -> Any:
        body = given if isinstance(given, bytes) else json.dumps(BASE[kind] | given).encode()
        return parse_body(body, kinds[kind])

    return read


def refused(parse: Parse, kind: str, given: dict[str, Any] | bytes, param: str | None, says: str = "") -> ErrorDetail:
    """Check that the request is refused, with this field, in a short message without internals."""
    try:
        parse(kind, given)
    except InvalidRequest as refusal:
        error = as_api_error(refusal).detail()
    else:
        raise AssertionError(f"accepted: {kind} {str(given)[:200]}")
    assert param is None or (error.param or "").startswith(param), error
    assert says in error.message and error.message.isprintable() and len(error.message) < 2_000, error
    leaked = INTERNALS.search(error.message)
    assert leaked is None or leaked[0] in str(given), error
    if re.match(r"\S+ must be ", error.message):
        assert "(got " in error.message, error
    return error


def test_numbers(parse: Parse) -> None:
    for field in RANGES:
        for value in field.outside():
            error = refused(parse, field.kind, field.body(value), field.name)
            assert error.message.partition(" (got ")[0].partition(":")[0] == field.says, (field.name, value)
        for value in (repr(field.low), "1", repr(field.high)):
            if field.name not in ("n", "best_of", "min_tokens") and not (field.open_low and value == repr(field.low)):
                parse(field.kind, field.body(value))


@pytest.mark.parametrize("kind", GENERATING)
def test_fields(parse: Parse, kind: str) -> None:
    for name, value, says in SHARED + (COMPLETION if kind == "completion" else CHAT):
        refused(parse, kind, {name: value}, name, says)
    for name, value, param, says in NESTED:
        refused(parse, kind, {name: value}, param, says)
    for name, values in VALUES_OF.items():
        for value in values:
            refused(parse, kind, {name: value}, name)


def test_odd_ids(parse: Parse) -> None:
    for name in ("prompt", "stop_token_ids", "allowed_token_ids"):
        for ids in invalid_id_lists():
            given = [ids] if name == "prompt" and isinstance(ids[0], str | list) else ids
            error = refused(parse, "completion", {name: given}, name)
            assert "token ids" in error.message or "integer" in error.message
        edge: dict[str, Any] = {name: [VOCAB - 1]}
        parse("completion", edge)
        for beyond in (VOCAB, VOCAB + 1, 10**6, 2**31 - 1):
            refused(parse, "completion", {name: [beyond]}, name, f"0 to {VOCAB - 1}")


def test_logit_bias(parse: Parse) -> None:
    for key in BIAS_KEYS:
        allowed = f"keys must be token ids from 0 to {VOCAB - 1}"
        refused(parse, "completion", {"logit_bias": {key: 1}}, "logit_bias", allowed)
    for value in BIAS_VALUES:
        body = f'{{"prompt": [5], "logit_bias": {{"5": {value}}}}}'.encode()
        refused(parse, "completion", body, "logit_bias", "logit_bias of token 5 must be a number from -100 to 100")
    for value in ([], [1], [["5", 1]], "x", 7, True, {str(i): 1 for i in range(1025)}):
        refused(parse, "chat", {"logit_bias": value}, "logit_bias", "must be an object of at most 1024")
    parse("chat", {"logit_bias": {str(i): (-1) ** i * 100 for i in range(VOCAB)}})


def test_jobs(parse: Parse) -> None:
    for path in JOB_FIELDS:
        *parents, name = path.split(".")
        for value in JOBS:
            fields = {name: value} if name != "trajectory_id" else {name: value, "session_id": "run"}
            for parent in reversed(parents):
                fields = {parent: fields}
            refused(parse, "completion", fields, path, "1 to 256 characters")


def test_models(parse: Parse) -> None:
    for kind in BASE:
        for name in MODELS:
            error = refused(parse, kind, {"model": name}, "model", "does not exist")
            assert error.code == "model_not_found" and len(error.message) < 1200
        for value in NO_NAMES:
            refused(parse, kind, {"model": value}, "model", "model must be a string")


def test_fields_of_other_servers(parse: Parse) -> None:
    """Embeddings and adapters are refused by name, with any content; an empty value asks for nothing."""
    for names, values, says in (
        (TENSOR_FIELDS, TENSORS, "is not supported"),
        (ADAPTER_FIELDS, ADAPTERS, "is not supported: name the adapter as model"),
        (("chat_template",), TEMPLATES, "is not supported: start the server with --chat-template"),
    ):
        for name in names:
            for value in filter(None, values):
                refused(parse, "completion", {name: value}, name, says)


def test_conversations(parse: Parse) -> None:
    for messages in INVALID_CONVERSATIONS:
        refused(parse, "chat", {"messages": messages}, "messages")
        if messages is not None:
            refused(parse, "tokenize", {"messages": messages}, "messages")
    for message in NO_MESSAGES:
        refused(parse, "chat", {"messages": [message, USER]}, "messages[0]")
        refused(parse, "chat", {"messages": [USER, message]}, "messages[1]")
    for part in PARTS:
        for role in ("user", "system", "assistant", "tool"):
            messages = [{"role": role, "content": [part]}, USER]
            refused(parse, "chat", {"messages": messages}, "messages[0].content[0]")


def test_tools(parse: Parse) -> None:
    for fields, param, says in TOOLS:
        refused(parse, "chat", fields, param, says)
    for tools in INVALID_TOOLS:
        refused(parse, "chat", {"tools": tools}, "tools")
        refused(parse, "tokenize", {"messages": MESSAGES, "tools": tools}, "tools")
    for choice in INVALID_CHOICES:
        refused(parse, "chat", {"tools": [tool()], "tool_choice": choice}, "tool_choice")
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        for none in (None, []):
            refused(parse, "chat", {"tools": none, "tool_choice": choice}, "tool_choice")


def test_constraints(parse: Parse) -> None:
    for value in (*OUTPUT_FORMS, *PAIRS):
        refused(parse, "completion", {"structured_outputs": value}, "structured_outputs")
    for value in FORMATS:
        refused(parse, "chat", {"response_format": value}, "response_format")
    for kind in KINDS:
        for outputs in CONSTRAINTS:
            both = {"structured_outputs": outputs, "response_format": kind}
            refused(parse, "chat", both, "response_format", "cannot be combined")
    for variables, says in BAD_KWARGS:
        refused(parse, "chat", {"chat_template_kwargs": variables}, "chat_template_kwargs", says)


def test_combinations(parse: Parse) -> None:
    for kind, fields, param, says in COMBINATIONS:
        refused(parse, kind, fields, param, says)


def test_bodies(parse: Parse) -> None:
    codes = ("invalid_json", "invalid_value", "missing_required_parameter", "unknown_parameter")
    for kind in BASE:
        for body in NOT_JSON:
            assert refused(parse, kind, body, None).code in codes
        for body in NO_OBJECTS:
            refused(parse, kind, body, None, "must be a JSON object")
    for body in MANY_VALUES.values():
        refused(parse, "completion", body, None, "request body has too many values")


def test_every_value_in_every_field(parse: Parse) -> None:
    """Accepted, or refused by the name of the field, or of one that contradicts it."""
    generated = (*bodies.SAMPLING_FIELDS, "logit_bias")
    fields: dict[str, tuple[str, ...]] = {
        "completion": (*bodies.CompletionBody.__struct_fields__, *generated),
        "chat": (*bodies.ChatBody.__struct_fields__, *generated),
        "embedding": EmbeddingBody.__struct_fields__,
        "score": ScoreBody.__struct_fields__,
        "rerank": RerankBody.__struct_fields__,
        "tokenize": bodies.TokenizeBody.__struct_fields__,
        "detokenize": ("model", "tokens"),
    }
    for kind, names in fields.items():
        for name in names:
            for value in VALUES:
                try:
                    parse(kind, {name: value})
                except InvalidRequest as error:
                    param = error.param or ""
                    assert param.startswith(name) or param in NEIGHBOURS, (kind, name, value, param)


@pytest.mark.full
@given(fields=ANY_FIELDS)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_value_is_accepted_or_refused(parse: Parse, fields: dict[str, Any]) -> None:
    """No other exception than InvalidRequest is raised."""
    for kind in GENERATING:
        with contextlib.suppress(InvalidRequest):
            parse(kind, fields)
