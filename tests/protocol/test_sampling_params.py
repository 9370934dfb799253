"""Every field of SamplingParams: what is accepted, and that a refusal names the field and its range."""

import math
from typing import Any

import msgspec
import pytest

from quire.protocol.errors import InvalidRequest
from quire.protocol.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams, seed_for_sample

NOT_INTEGERS = [1.5, "1", True, None, [1], math.nan]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, "hot", True, None, [0.5]]
GOOD: dict[str, list[Any]] = {
    "n": [1, 2, 128],
    "temperature": [0, 0.0, 1, 1e-40, 2.0],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0, 0.0, 0.3, 1.0],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [None, 1, 2**31 - 1],
    "logprobs": [None, 0, 20],
    "stop": [[], "x", ["a", "b"], ["x" * MAX_STOP_LENGTH], ["x"] * MAX_STOP_STRINGS],
    "stop_token_ids": [[], [0], [2**31 - 1]],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "include_stop_str_in_output": [True, False],
}
BAD: dict[str, tuple[list[Any], str]] = {
    "n": ([0, -1, 129, 10**6, 2**63, *NOT_INTEGERS], "n must be an integer from 1 to 128"),
    "temperature": ([-0.001, 2.001, 1e308, *NOT_NUMBERS], "temperature must be a number from 0 to 2"),
    "top_p": ([0, 0.0, -1, 1.1, *NOT_NUMBERS], "top_p must be a number above 0 and at most 1"),
    "top_k": ([-2, 2**31, *NOT_INTEGERS], "top_k must be an integer from -1 to 2147483647"),
    "min_p": ([-0.1, 1.1, *NOT_NUMBERS], "min_p must be a number from 0 to 1"),
    "seed": (
        [2**64, 2**65, -(2**63) - 1, *[v for v in NOT_INTEGERS if v is not None]],
        f"seed must be an integer from {-(2**63)} to {2**64 - 1}",
    ),
    "max_tokens": (
        [0, -1, 2**31, 2**70, *[v for v in NOT_INTEGERS if v is not None]],
        "max_tokens must be an integer from 1 to 2147483647",
    ),
    "logprobs": (
        [-1, 21, 10_000, *[v for v in NOT_INTEGERS if v is not None]],
        "logprobs must be an integer from 0 to 20",
    ),
    "stop": ([[""], [1], [None], 5, None, ["x"] * 65, ["x" * 1025], {"a": 1}], "stop"),
    "stop_token_ids": ([5, None, "1", [-1], ["1"], [1.0], [True], [2**31], [0] * 1025], "stop_token_ids"),
    "ignore_eos": ([0, 1, "true", None], "ignore_eos must be true or false"),
    "skip_special_tokens": ([0, "no", None], "skip_special_tokens must be true or false"),
    "include_stop_str_in_output": ([1, None], "include_stop_str_in_output must be true or false"),
}


def cases(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_values_in_range_are_accepted(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == ([value] if isinstance(value, str) else value)


@pytest.mark.parametrize(("name", "value"), cases({name: values for name, (values, _) in BAD.items()}))
def test_a_refusal_names_the_field_and_its_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert BAD[name][1] in caught.value.message


def test_both_tables_cover_every_field() -> None:
    assert set(GOOD) == set(BAD) == set(SamplingParams.__struct_fields__)


def test_the_defaults_travel_as_nothing() -> None:
    assert msgspec.msgpack.encode(SamplingParams()) == b"\x80"


@pytest.mark.parametrize("raw", [{"n": 0}, {"temperature": -1}, {"top_p": 0}, {"stop": [""]}, {"mirostat": 1}])
def test_decoding_checks_as_building_does(raw: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, InvalidRequest)):
        msgspec.json.decode(msgspec.json.encode(raw), type=SamplingParams)


def test_temperature_zero_is_greedy_and_nothing_else_is() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-40).greedy


def test_params_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_seeds_of_samples_are_fixed_for_ever() -> None:
    """Golden values: SplitMix64 from state 0 begins with the first of these (Vigna's reference code)."""
    assert seed_for_sample(0, 0) == 0xE220A8397B1DCDAF
    assert seed_for_sample(0, 1) == 0x6E789E6AA1B965F4
    assert seed_for_sample(1234567, 0) == 6457827717110365317


def test_seeds_of_samples_differ_and_fit_64_bits() -> None:
    seeds = {seed_for_sample(seed, i) for seed in (0, 1, -1, 2**64 - 2, -(2**63)) for i in range(128)}
    assert len(seeds) == 5 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_negative_seed_is_the_same_64_bits() -> None:
    assert seed_for_sample(-1, 3) == seed_for_sample(2**64 - 1, 3)
