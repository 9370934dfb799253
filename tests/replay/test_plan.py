"""``quire plan``: the search, and answers for a small trace."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.launch.cli import main
from quire.replay.plan.search import LeastSearch
from quire.replay.report.figures import attained_share
from quire.replay.run.run_record import RequestRun, RunRecord


@given(first=st.integers(1, 64), length=st.integers(0, 63), enough=st.integers(1, 130))
def test_search_finds_the_least_number_with_few_tries(first: int, length: int, enough: int) -> None:
    last = first + length
    search, tried = LeastSearch(first, last), []
    while (number := search.next_number) is not None:
        assert first <= number <= last and number not in tried
        tried.append(number)
        search.tried(number >= enough)
    assert search.answer == (None if enough > last else max(enough, first))
    assert len(tried) <= 2 * (length + 1).bit_length() + 1


def test_a_request_attains_all_targets_or_none() -> None:
    runs = [
        RequestRun("good", 0.0, 1, first_token=1.0, end=2.0, num_output_tokens=11, finish="length"),
        RequestRun("one token", 0.0, 1, first_token=1.0, end=1.0, num_output_tokens=1, finish="length"),
        RequestRun("slow", 0.0, 1, first_token=1.0, end=2.1, num_output_tokens=11, finish="length"),
        RequestRun("late", 0.0, 1, first_token=1.1, end=2.1, num_output_tokens=11, finish="length"),
        RequestRun("rejected", 0.0, 1, end=0.0, finish="rejected"),
    ]
    assert attained_share(RunRecord(requests=runs), {"ttft": 1.0, "tpot": 0.1}) == 0.4
    assert attained_share(RunRecord(requests=runs), {"e2e": 2.1}) == 0.8
    assert attained_share(RunRecord(), {"e2e": 1.0}) is None


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests at once, of 1,000 tokens each, which differ."""
    lines = [{"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [i, i + 100]} for i in range(40)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, dict[str, object]]:
    main(["plan", *map(str, words), "--jobs", "1", "--cost", "constant:100", "--set", "max_num_batched_tokens=2000"])
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


@pytest.mark.full
def test_answer_is_the_least_number_of_engines(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, found = plan(capsys, trace, "--slo", "ttft=0.65", "--set", "block_size=512", "--set", "max_prefill_share=1.0")
    assert "4 engines (4 devices): 99 % of the requests have ttft within 0.65 s (attained: 100.00%)" in out
    assert (found["engines"], found["devices"], found["size"]) == (4, 4, {})
    tried = {each["engines"]: each["attained"] for each in found["tried"]}  # type: ignore[attr-defined]
    assert tried[3] < 0.99 <= tried[4] == 1.0
    out, found = plan(capsys, trace, "--slo", "ttft=0.01", "--engines", "1-2", "--set", "block_size=512")
    assert "--engines 1-2 is too few: at most 0.00% of the requests have ttft within 0.01 s, not 99 %" in out
    assert found["engines"] is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--slo", "ttft"], "must be NAME=SECONDS with a name of ttft, tpot, e2e (got 'ttft')"),
        (["--slo", "speed=1"], "must be NAME=SECONDS with a name of ttft, tpot, e2e (got 'speed=1')"),
        (["--slo", "ttft=0"], "ttft must be a number of seconds above 0 (got 0)"),
        (["--slo", "ttft=1,tpot=1,ttft=2"], "ttft is given twice"),
        (["--slo", "ttft=1", "--engines", "0-4"], "must be FIRST-LAST with 1 <= FIRST <= LAST <= 64 (got 0-4)"),
        (["--slo", "ttft=1", "--engines", "5-4"], "must be FIRST-LAST with 1 <= FIRST <= LAST <= 64 (got 5-4)"),
        (["--slo", "ttft=1", "--engines", "65"], "(got 65)"),
        (["--slo", "ttft=1", "--engines", "a-2"], "(got a-2)"),
        (["--slo", "ttft=1", "--percentile", "101"], "must be above 0 and at most 100 (got 101)"),
        (["--slo", "ttft=1", "--set", "data_parallel_size=2"], "use --engines"),
        (["--slo", "ttft=1", "--set", "routing=magic"], "--set routing must be one of cache, least-load"),
        ([], "the following arguments are required: --slo"),
    ],
)
def test_bad_flags_give_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(trace), "--jobs", "1", *words])
    err = capsys.readouterr().err
    assert caught.value.code and reason in err and err.count("\n") == 1
