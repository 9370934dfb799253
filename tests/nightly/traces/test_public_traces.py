"""Whole public traces, if QUIRE_TRACES is their directory: sums, percentiles and hits published with them."""

import math
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from measured_runs import measured_workload

from quire.replay.formats.detect import load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.workload.workload import SHORT_HASH_BYTES, Call, Workload, block_names


class Found(NamedTuple):
    hit_blocks: int
    requests_with_a_hit: int
    distinct_blocks: int
    accesses: int


def infinite_cache(calls: list[Call], block_size: int) -> Found:
    """Count prefix hits of requests in sequence, without eviction; at least one token of each prompt is computed."""
    cached: set[bytes] = set()
    hit_blocks = with_hit = accesses = 0
    for call in calls:
        joined = block_names(call, block_size)
        full = call.num_prompt_tokens // block_size
        names = [joined[i : i + SHORT_HASH_BYTES] for i in range(0, full * SHORT_HASH_BYTES, SHORT_HASH_BYTES)]
        reusable = names[: (call.num_prompt_tokens - 1) // block_size]
        hits = next((i for i, name in enumerate(reusable) if name not in cached), len(reusable))
        hit_blocks += hits
        with_hit += hits > 0
        accesses += full
        cached.update(names)
    return Found(hit_blocks, with_hit, len(cached), accesses)


def percentile(values: list[int], share: float) -> int:
    """Return the percentile by nearest rank."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def traces() -> Path:
    folder = os.environ.get("QUIRE_TRACES")
    if not folder:
        pytest.skip("QUIRE_TRACES is not set to the directory of traces")
    return Path(folder)


def load(name: str) -> Workload:
    return load_workload(traces() / name, "auto", LoadOptions())


@pytest.fixture(scope="module")
def half_hour() -> Workload:
    return load("mooncake")


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("mooncake", (12870.1, 7640, 28641, 91305, 123192), (345.7, 356, 609, 1105, 2000)),
        (
            "azure2023/AzureLLMInferenceTrace_conv.first_half.csv.gz",
            (1237.0, 1035, 4075, 4122, 14050),
            (221.9, 141, 428, 613, 1000),
        ),
        (
            "azure2023/AzureLLMInferenceTrace_code.first_half.csv.gz",
            (2040.8, 1454, 5177, 7436, 7437),
            (27.5, 13, 54, 248, 1899),
        ),
    ],
)
def test_lengths(name: str, inputs: tuple[float, ...], outputs: tuple[float, ...]) -> None:
    calls = load(name).calls
    for expected, values in (
        (inputs, [call.num_prompt_tokens for call in calls]),
        (outputs, [call.num_output_tokens for call in calls]),
    ):
        shares = [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)]
        assert (round(sum(values) / len(values), 1), *shares) == expected


@pytest.mark.parametrize(
    ("name", "count", "span", "rate", "busiest", "cv"),
    [
        ("mooncake", 5719, 1797.0, 3.1825, 240, 2.923),
        ("azure2023/AzureLLMInferenceTrace_conv.first_half.csv.gz", 9683, 1743.404, 5.5541, 480, 1.072),
        ("azure2023/AzureLLMInferenceTrace_code.first_half.csv.gz", 4409, 1422.081, 3.1004, 632, 14.103),
    ],
)
def test_arrivals(name: str, count: int, span: float, rate: float, busiest: int, cv: float) -> None:
    times = [call.arrival for call in load(name).calls]
    gaps = np.diff(times)
    assert len(times) == count
    assert round(times[-1], 3) == span
    assert round(count / times[-1], 4) == rate
    assert max(Counter(int(time // 60) for time in times).values()) == busiest
    assert round(gaps.std() / gaps.mean(), 3) == cv


class TestMooncake:
    @pytest.mark.parametrize(
        ("block_size", "hit_blocks", "requests_with_a_hit"),
        [
            (16, 1_597_181, 5718),
            (64, 399_273, 5718),
            (128, 199_624, 5718),
            (256, 99_806, 5718),
            (512, 49_889, 5718),
            (1024, 22_619, 2021),
        ],
    )
    def test_infinite(self, half_hour: Workload, block_size: int, hit_blocks: int, requests_with_a_hit: int) -> None:
        assert infinite_cache(half_hour.calls, block_size)[:2] == (hit_blocks, requests_with_a_hit)

    def test_blocks(self, half_hour: Workload) -> None:
        assert infinite_cache(half_hour.calls, 512)[2:] == (90_869, 140_758)
        assert sum(call.num_prompt_tokens for call in half_hour.calls) == 73_604_194


class TestAgentic:
    def test_small(self) -> None:
        calls = load("agentic_coding/conversations_16_small.jsonl.xz").calls
        assert infinite_cache(calls, 64) == (532_732, 334, 48_512, 581_244)
        assert (len(calls), calls[-1].arrival) == (350, 7452.0)
        tokens = sum(call.num_prompt_tokens for call in calls), sum(call.num_output_tokens for call in calls)
        assert tokens == (37_211_575, 205_504)
        assert max(Counter(int(call.arrival // 60) for call in calls).values()) == 14
        assert sum(call.after is None for call in calls) == 16

    def test_large(self) -> None:
        workload = load("agentic_coding/conversations_120.jsonl.xz")
        calls = workload.calls
        assert infinite_cache(calls, 64) == (14_207_074, 6808, 599_321, 14_806_395)
        assert (len(calls), calls[-1].arrival) == (6938, 25_706.0)
        assert "7 empty answers are counted as one token" in workload.notes
        tokens = sum(call.num_prompt_tokens for call in calls), sum(call.num_output_tokens for call in calls)
        assert tokens == (947_830_118, 3_003_399 + 7)
        assert max(Counter(int(call.arrival // 60) for call in calls).values()) == 74
        assert sum(call.after is None for call in calls) == 120
        assert any(note.startswith("22 sub-agents") for note in workload.notes)

    def test_rest(self) -> None:
        calls = load("agentic_coding/conversations_rest.jsonl.xz").calls
        assert len({call.conversation for call in calls}) == 139
        assert len(calls) == 9848


@pytest.mark.parametrize(
    ("name", "count", "sessions"), [("miniswe", 206, 10), ("magagent", 392, 13), ("taubench", 249, 12)]
)
def test_agent_text(name: str, count: int, sessions: int) -> None:
    calls = load(f"agent_text/{name}.jsonl.xz").calls
    assert (len(calls), len({call.conversation for call in calls})) == (count, sessions)
    if name == "miniswe":
        assert sum(call.answer is not None for call in calls) == count - sessions, "each call extends the previous one"


@pytest.mark.parametrize("name", ["rtx4090_llama31-8b", "rtxpro6000_llama31-8b"])
def test_measured(name: str) -> None:
    calls = measured_workload(traces() / "measured_vllm" / name).calls
    assert infinite_cache(calls, 16).hit_blocks * 16 == 19_520
    assert sum(call.num_prompt_tokens for call in calls) == 257_239
