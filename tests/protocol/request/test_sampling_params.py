"""Every field of SamplingParams: accepted values, and errors that name the field and its range."""

import math
from typing import Any

import msgspec
import pytest
from tiers import thinned

from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams, seed_for_sample
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs

NOT_INTEGERS = [1.5, "1", True, None, [1], math.nan]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, 10**309, -(10**400), "hot", True, None, [0.5]]
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
    "return_routed_experts": [True, False],
    "return_timeline": [True, False],
    "include_stop_str_in_output": [True, False],
    "min_tokens": [0, 1, 16],
    "presence_penalty": [-2, 0.5, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "repetition_penalty": [0.01, 1, 10.0],
    "logit_bias": [{}, {0: -100, 2**31 - 1: 100.0}, dict.fromkeys(range(1024), 1)],
    "allowed_token_ids": [None, [0], [5, 3], list(range(65_536))],
    "bad_words": [[], ["x"], ["x" * 256] * 1024],
    "bad_words_token_ids": [[], [[0]], [[1, 2, 3]] * 2048],
    "prompt_logprobs": [None, 0, 20],
    "thinking_token_budget": [None, 0, 2**31 - 1],
    "structured_outputs": [None, StructuredOutputs(regex="a+"), StructuredOutputs(json_object=True)],
    "repetition_detection": [None, RepetitionDetection(max_pattern_size=1)],
    "extra_args": [{}, {"a": 1, "b": [True, "x"], "c": None, "d": 0.5}],
    "use_beam_search": [False],
    "beam_width": [None],
    "length_penalty": [1, 1.0],
    "early_stopping": [False],
    "skip_reading_prefix_cache": [True, False],
    "logprob_token_ids": [[], [5, 3], list(range(128))],
    "plain_spans": [[], [[0, 2**31 - 1], [5, 5]]],
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
    "return_routed_experts": ([1, "yes", None], "return_routed_experts must be true or false"),
    "return_timeline": ([1, "yes", None], "return_timeline must be true or false"),
    "include_stop_str_in_output": ([1, None], "include_stop_str_in_output must be true or false"),
    "min_tokens": ([-1, 2**31, *NOT_INTEGERS], "min_tokens must be an integer from 0 to 2147483647"),
    "presence_penalty": ([-2.01, 3, *NOT_NUMBERS], "presence_penalty must be a number from -2 to 2"),
    "frequency_penalty": ([-3, 2.01, *NOT_NUMBERS], "frequency_penalty must be a number from -2 to 2"),
    "repetition_penalty": (
        [0, -1, 10.5, *NOT_NUMBERS],
        "repetition_penalty must be a number from 0.01 to 10",
    ),
    "logit_bias": (
        [5, None, [1], {-1: 1}, {2**31: 1}, {"1": 1}, {1.0: 1}, {1: math.nan}, {1: math.inf}, {1: 101}, {1: "2"}],
        "logit_bias",
    ),
    "allowed_token_ids": (
        [[], 5, [-1], [1.0], ["1"], [True], [2**31], [3, 3], list(range(100_000))],
        "allowed_token_ids",
    ),
    "bad_words": ([None, "x", [""], [1], ["x" * 257], ["x"] * 1025], "bad_words"),
    "bad_words_token_ids": ([None, [1], [[]], [[-1]], [[1.0]], [[1]] * 2049, [[1] * 257]], "bad_words_token_ids"),
    "prompt_logprobs": ([-1, 21, True, 1.0, "1"], "prompt_logprobs must be an integer from 0 to 20"),
    "thinking_token_budget": ([-1, 2**31, True, 1.0], "thinking_token_budget must be an integer from 0 to"),
    "structured_outputs": ([{}, "a+", 1], "structured_outputs must be"),
    "repetition_detection": ([{}, 1], "repetition_detection must be"),
    "extra_args": (
        [None, [1], {1: 2}, {"a": {}}, {"a": [[1]]}, {"a": "x" * 70_000}, {"a": object()}],
        "extra_args must be an object of strings",
    ),
    "use_beam_search": ([1, "yes", None], "use_beam_search must be true or false"),
    "beam_width": ([1, 64], "beam_width is a parameter of beam search: it needs use_beam_search"),
    "length_penalty": ([10.5, -11, *NOT_NUMBERS], "length_penalty must be a number from -10 to 10"),
    "early_stopping": ([1, None, "always"], 'early_stopping must be true, false or "never"'),
    "skip_reading_prefix_cache": ([1, "yes", None], "skip_reading_prefix_cache must be true or false"),
    "logprob_token_ids": ([None, 5, [-1], ["a"], list(range(129))], "must be a list of 0 to 128 token ids"),
    "plain_spans": ([None, 1, [1], [[1]], [[1, 2, 3]], [[-1, 2]], [[0, "x"]]], "plain_spans must be a list of"),
}
BAD_WITH_BEAMS: dict[str, tuple[list[Any], str]] = {
    "beam_width": ([0, 65, -1, *NOT_INTEGERS], "beam_width with use_beam_search must be an integer from 1 to 64"),
    "n": ([2], "n must be 1 with use_beam_search"),
    "temperature": ([0.5, 2], "temperature must be 0.0 or 1.0 with use_beam_search"),
    "top_p": ([0.9], "top_p must be 1.0 with"),
    "top_k": ([40], "top_k must be 0 or -1 with"),
    "min_p": ([0.1], "min_p must be 0.0 with"),
    "presence_penalty": ([1], "presence_penalty must be 0.0 with"),
    "frequency_penalty": ([1], "frequency_penalty must be 0.0 with"),
    "repetition_penalty": ([1.5], "repetition_penalty must be 1.0 with"),
    "stop": ([["x"]], "stop must be [] with"),
    "stop_token_ids": (
        [list(range(65))],
        "stop_token_ids must have at most 64 token ids with use_beam_search (got 65)",
    ),
    "logprobs": ([0], "logprobs must be None with"),
    "prompt_logprobs": ([0], "prompt_logprobs must be None with"),
    "logprob_token_ids": ([[5]], "logprob_token_ids must be [] with"),
    "thinking_token_budget": ([1], "thinking_token_budget must be None with"),
    "repetition_detection": ([RepetitionDetection(max_pattern_size=1)], "repetition_detection must be None with"),
    "extra_args": ([{"a": 1}], "extra_args must be {} with"),
    "return_routed_experts": ([True], "return_routed_experts must be False with"),
    "return_timeline": ([True], "return_timeline must be False with"),
    "allowed_token_ids": ([[1, 2, 3]], "must have at least beam_width=4 token ids with use_beam_search (got 3)"),
}


def cases(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name in table for value in table[name]]


@pytest.mark.parametrize(("name", "value"), thinned(cases(GOOD), keep=40))
def test_values_in_range_are_accepted(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    assert getattr(params, name) == ([value] if isinstance(value, str) else value)


@pytest.mark.parametrize(("name", "value"), cases({name: values for name, (values, _) in BAD.items()}))
def test_error_names_the_field_and_its_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert BAD[name][1] in caught.value.message


@pytest.mark.parametrize(("name", "value"), cases({name: values for name, (values, _) in BAD_WITH_BEAMS.items()}))
def test_beam_search_refuses_what_it_does_not_use(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{"use_beam_search": True, "beam_width": 4, name: value})
    assert caught.value.param == name
    assert BAD_WITH_BEAMS[name][1] in caught.value.message


@pytest.mark.parametrize(("width", "most"), [(1, 9), (4, 12), (8, 16), (64, 128)])
def test_workers_report_enough_candidates(width: int, most: int) -> None:
    params = SamplingParams(use_beam_search=True, beam_width=width, length_penalty=-10, early_stopping="never")
    assert (params.num_candidates, params.num_outputs) == (most, width)
    assert (SamplingParams(logprobs=3, n=2).num_candidates, SamplingParams(n=2).num_outputs) == (3, 2)


def test_both_tables_cover_every_field() -> None:
    assert set(GOOD) == set(BAD) == set(SamplingParams.__struct_fields__)


def test_defaults_are_not_encoded() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens, which is 3 \(got 4\)"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": "{}", "regex": "a"},
        {"json_object": False},
        {"json_object": 1},
        {"regex": ""},
        {"regex": 5},
        {"grammar": "x" * (512 * 1024 + 1)},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "a"},
        {"choice": ["a"] * 10_001},
        {"regex": "\ud800"},
        {"json": {"a": object()}},
    ],
)
def test_invalid_constraint_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param == "structured_outputs"


def test_schema_given_as_an_object_is_stored_as_text() -> None:
    assert StructuredOutputs(json={"b": 1, "a": True}).json == '{"b":1,"a":true}'
    assert StructuredOutputs(json=True).kind == "json" and StructuredOutputs(choice=["a"]).kind == "choice"


def test_ignore_eos_cannot_be_combined_with_a_grammar() -> None:
    with pytest.raises(InvalidRequest, match="ignore_eos cannot be combined"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))


@pytest.mark.parametrize("raw", [{"n": 0}, {"temperature": -1}, {"top_p": 0}, {"stop": [""]}, {"mirostat": 1}])
def test_decoding_validates_values(raw: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, InvalidRequest)):
        msgspec.json.decode(msgspec.json.encode(raw), type=SamplingParams)


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-40).greedy


def test_params_are_immutable() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_seeds_of_samples_equal_golden_values() -> None:
    """SplitMix64 from state 0 begins with the first two of these (Vigna's reference code)."""
    assert seed_for_sample(0, 0) == 0xE220A8397B1DCDAF
    assert seed_for_sample(0, 1) == 0x6E789E6AA1B965F4
    assert seed_for_sample(1234567, 0) == 6457827717110365317


def test_seeds_of_samples_differ_and_fit_64_bits() -> None:
    seeds = {seed_for_sample(seed, i) for seed in (0, 1, -1, 2**64 - 2, -(2**63)) for i in range(128)}
    assert len(seeds) == 5 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_negative_seed_equals_its_64_bit_unsigned_value() -> None:
    assert seed_for_sample(-1, 3) == seed_for_sample(2**64 - 1, 3)
