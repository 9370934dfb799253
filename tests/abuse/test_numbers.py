"""Numbers that are invalid, too large, too small, or of another type; and lists and objects of them."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from abuse import CHAT, COMPLETIONS, AbusedServer, assert_refused
from abused_app import AbusedApp

VOCAB = 1024
CONTEXT = 2048
# JSON text of another type, or not valid JSON.
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

    path: str
    name: str
    low: float
    high: float
    says: str
    integer: bool = True
    open_low: bool = False
    beside: str = ""

    def body(self, value: str) -> bytes:
        prompt = '"prompt": [5, 6]' if self.path == COMPLETIONS else '"messages": [{"role": "user", "content": "a"}]'
        length = "" if self.name.startswith("max_") else ', "max_tokens": 1'
        return f'{{{prompt}{length}{self.beside}, "{self.name}": {value}}}'.encode()

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


def integer(path: str, name: str, low: int, high: int, beside: str = "") -> Range:
    return Range(path, name, low, high, f"{name} must be an integer from {low} to {high}", beside=beside)


def real(name: str, low: float, high: float, *, open_low: bool = False) -> Range:
    edge = f"above {low:g} and at most" if open_low else f"from {low:g} to"
    says = f"{name} must be a number {edge} {high:g}"
    return Range(COMPLETIONS, name, low, high, says, integer=False, open_low=open_low)


RANGES = [
    integer(COMPLETIONS, "n", 1, 128),
    integer(CHAT, "n", 1, 128),
    integer(COMPLETIONS, "best_of", 1, 128),
    integer(COMPLETIONS, "max_tokens", 1, CONTEXT),
    integer(CHAT, "max_tokens", 1, CONTEXT),
    integer(CHAT, "max_completion_tokens", 1, CONTEXT),
    integer(COMPLETIONS, "min_tokens", 0, 2**31 - 1),
    integer(COMPLETIONS, "top_k", -1, 2**31 - 1),
    integer(COMPLETIONS, "logprobs", 0, 20),
    integer(COMPLETIONS, "prompt_logprobs", 0, 20),
    integer(CHAT, "top_logprobs", 0, 20, beside=', "logprobs": true'),
    integer(COMPLETIONS, "seed", -(2**63), 2**64 - 1),
    integer(COMPLETIONS, "priority", -(2**31), 2**31 - 1),
    integer(COMPLETIONS, "thinking_token_budget", 0, 2**31 - 1),
    real("temperature", 0, 2),
    real("top_p", 0, 1, open_low=True),
    real("min_p", 0, 1),
    real("presence_penalty", -2, 2),
    real("frequency_penalty", -2, 2),
    real("repetition_penalty", 0.01, 10),
]


@pytest.mark.parametrize("field", RANGES, ids=lambda field: f"{field.name} of {field.path.split('/')[2]}")
def test_values_out_of_range(app: AbusedApp, field: Range) -> None:
    mutations = field.outside()
    assert len(mutations) >= 20
    for value in mutations:
        response = app.post(field.path, content=field.body(value))
        error = assert_refused(response, 400, field.name)
        assert error["message"].partition(" (got ")[0] == field.says, value


def test_range_limits_are_accepted(app: AbusedApp) -> None:
    for field in RANGES:
        edges: tuple[float, ...] = (field.low, field.high)
        if field.name == "n":
            edges = (1, 3)
        elif field.name == "best_of":
            edges = (1,)
        elif field.name.startswith("max_"):
            edges = (1, 4)
        elif field.name == "min_tokens":
            edges = (0,)
        for value in edges:
            written = "1e-9" if field.open_low and value == field.low else repr(value)
            response = app.post(field.path, content=field.body(written))
            assert response.status_code == 200, response.text


MIN_AND_MAX_TOKENS = [
    *((least, least - 1) for least in (2, 3, 5, 17, 1024, CONTEXT)),
    *((least, 1) for least in (3, 10, 100, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2**16, 2**31 - 1)),
    *((2**31 - 1, most) for most in (2, 100, CONTEXT - 1, CONTEXT)),
    *((least, None) for least in (17, 100, CONTEXT, 2**31 - 1)),  # the default is 16 tokens
]


def test_max_tokens_below_min_tokens(app: AbusedApp) -> None:
    for least, most in MIN_AND_MAX_TOKENS:
        refused = app.post(COMPLETIONS, {"prompt": [5], "min_tokens": least, "max_tokens": most})
        assert_refused(refused, 400, "min_tokens", "min_tokens must be at most max_tokens")


def test_inconsistent_numbers(app: AbusedApp) -> None:
    for length, wanted in ((2, CONTEXT - 1), (CONTEXT - 1, 2), (100, CONTEXT), (CONTEXT - 5, 6)):
        refused = app.post(COMPLETIONS, {"prompt": [5] * length, "max_tokens": wanted})
        error = assert_refused(refused, 400, "max_tokens", f"max_tokens must be from 1 to {CONTEXT - length}")
        assert error["code"] == "context_length_exceeded"
    for path, body in (
        (COMPLETIONS, {"prompt": ["a"] * 2048, "n": 2}),
        (COMPLETIONS, {"prompt": ["a"] * 17, "n": 128}),
    ):
        assert_refused(app.post(path, body), 400, "n", "prompts times n must be at most 2048")


VOLUMES: list[tuple[dict[str, Any], str]] = [
    *[({"n": 128, "prompt_logprobs": k}, "prompt_logprobs") for k in (16, 20)],
    *[({"prompt": [[5] * 300] * 100, "n": 20, "prompt_logprobs": k}, "prompt_logprobs") for k in (6, 7, 20)],
    *[({"prompt": [[5]] * 2048, "max_tokens": 2000, "logprobs": k}, "logprobs") for k in (8, 15, 20)],
]


def test_products_out_of_range(app: AbusedApp) -> None:
    """Refused before any sequence is submitted."""
    for fields, param in VOLUMES:
        refused = app.post(COMPLETIONS, {"prompt": [5] * 2000, "max_tokens": 1, **fields})
        assert_refused(refused, 400, param, "must be at most")
    assert app.engine.added == []


IDS_RANGE = f"integers from 0 to {VOCAB - 1}"


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


@pytest.mark.parametrize("name", ["prompt", "stop_token_ids", "allowed_token_ids"])
def test_invalid_token_ids(app: AbusedApp, name: str) -> None:
    for ids in invalid_id_lists():
        given = {name: ids}
        if name == "prompt" and isinstance(ids[0], str | list):
            given = {name: [ids]}
        error = assert_refused(app.complete(**given), 400, name)
        assert "token ids" in error["message"] or "integer" in error["message"], error


@pytest.mark.parametrize("name", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_last_token_id_and_the_next(server: AbusedServer, name: str) -> None:
    def given(token: int) -> Any:
        return {str(token): 1} if name == "logit_bias" else [token]

    assert server.complete(**{name: given(VOCAB - 1)}).status_code == 200
    for beyond in (VOCAB, VOCAB + 1, 2 * VOCAB, 10**6, 2**31 - 1):
        assert_refused(server.complete(**{name: given(beyond)}), 400, name, f"0 to {VOCAB - 1}")


BIAS_KEYS = (
    *(str(VOCAB), str(2**31), str(2**40), str(2**64), str(10**400), "-1", "-0", "+5", "05", "0x5", "5.0", "5e0", " 5"),
    *("5 ", "5\n", "", "abc", "²", "٣", "５", "1_000", "None", "NaN", "\x00", "😀", "5,6", "__class__"),
)
BIAS_VALUES = ("101", "-101", "1e9", "-1e9", "1e308", "1e999", "NaN", "Infinity", "-Infinity", '"5"', "true", "null")
BIAS_VALUES += ("[]", "[1]", "{}", "100.0000001", "-100.0000001", str(2**63), str(-(2**70)), '"x"', "false")
BIAS_VALUES += (str(10**309), str(-(10**400)))


def test_logit_bias(app: AbusedApp) -> None:
    for key in BIAS_KEYS:
        allowed = f"keys must be token ids from 0 to {VOCAB - 1}"
        assert_refused(app.complete(logit_bias={key: 1}), 400, "logit_bias", allowed)
    for value in BIAS_VALUES:
        content = f'{{"prompt": [5], "max_tokens": 1, "logit_bias": {{"5": {value}}}}}'.encode()
        refused = app.post(COMPLETIONS, content=content)
        assert_refused(refused, 400, "logit_bias", "logit_bias of token 5 must be a number from -100 to 100")
    for value in ([], [1], [["5", 1]], "x", 7, True, {str(i): 1 for i in range(1025)}):
        assert_refused(app.complete(logit_bias=value), 400, "logit_bias", "must be an object of at most 1024")
    assert app.complete(logit_bias={str(i): (-1) ** i * 100 for i in range(VOCAB)}).status_code == 200


REPETITIONS: list[tuple[Any, str]] = [
    *[({"max_pattern_size": value}, "max_pattern_size") for value in (0, -1, 1.5, "2", True, [], 2**31, 2**70)],
    *[({"max_pattern_size": 5, "min_pattern_size": v}, "min_pattern_size") for v in (0, -1, 6, 1.5, "2", True, 2**70)],
    *[({"max_pattern_size": 5, "min_count": v}, "min_count") for v in (1, 0, -1, 1.5, "2", True, 2**70)],
    *[(value, "repetition_detection") for value in ([], [1], 7, "x", True, {}, {"min_count": 2})],
]


def test_repetition_detection(app: AbusedApp) -> None:
    for value, says in REPETITIONS:
        error = assert_refused(app.complete(repetition_detection=value), 400, says=says)
        assert error["param"].startswith("repetition_detection")


TINY = ("5e-324", "1e-300", "1e-45", "1e-40", "1.2e-38", "1e-30", "1e-10", "1e-6")


@pytest.mark.full
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
def test_tiny_numbers(server: AbusedServer, name: str) -> None:
    """Accepted without a division by a number that underflowed to zero, also with large logits."""
    for value in TINY:
        for beside in ("", ', "logit_bias": {"5": 100, "6": -100}', ', "repetition_penalty": 0.01, "top_k": 3'):
            fields = f'"seed": 3, "logprobs": 2, "max_tokens": 3, "{name}": {value}{beside}'
            response = server.post(COMPLETIONS, content=f'{{"prompt": [5, 6, 7], {fields}}}'.encode())
            assert response.status_code == 200, response.text
            logprobs = response.json()["choices"][0]["logprobs"]["token_logprobs"]
            assert all(-10_000 < value <= 0 for value in logprobs), logprobs
