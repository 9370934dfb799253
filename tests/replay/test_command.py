"""``quire replay`` on the command line: kinds of replay, outputs, contradicting flags, bad input."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from front_end import EndlessEngine, EndlessSequence, FrontEnd
from scheduler_driver import Driver

from quire.launch.cli import main
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import AddRequest
from quire.scheduler_proc.trace.lines import StepDecision, decode_line, encode_line

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Run the command; return (exit status, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        status = 0
        try:
            main(["replay", *map(str, words)])
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Eight requests in four pairs, one second apart, which share their first block of 512 tokens."""
    lines = [
        {"timestamp": 1000 * (i // 2), "input_length": 700 + i, "output_length": 3 + i, "hash_ids": [0, i + 1]}
        for i in range(8)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class TestFlags:
    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (["--concurrency", "2", "--closed-loop"], "not allowed with argument --concurrency"),
            (["--concurrency", "0"], "--concurrency: must be a whole number of at least 1 (got 0)"),
            (["--concurrency", "1.5"], "--concurrency: must be a whole number"),
            (["--rate", "0"], "--rate: must be a number above 0 (got 0)"),
            (["--rate", "-1"], "--rate: must be a number above 0 (got -1)"),
            (["--rate", "nan"], "--rate: must be a number above 0 (got nan)"),
            (["--rate", "inf"], "--rate: must be a number above 0 (got inf)"),
            (["--start", "-1"], "--start: must be a number of at least 0"),
            (["--set", "block_size"], "'block_size' must be KEY=VALUE"),
            (["--set", "=3"], "'=3' must be KEY=VALUE"),
            (["--sweep", "block_size=16,,32"], "has an empty value"),
            (["--format", "mooncak"], "invalid choice: 'mooncak'"),
            (["--overlong", "cut"], "invalid choice: 'cut'"),
            (["--blok", "1"], "unknown flag --blok"),
            (["--sweep", "block_size=16,32", "--compare", "block_size=8"], "--sweep cannot be combined with --compare"),
            (["--sweep", "block_size=16", "--set", "block_size=8"], "block_size is given to both --set and --sweep"),
            (["--set", "block-size=16", "--set", "block_size=8"], "--set block_size is given twice"),
            (["--sweep", "block_size=16,32", "--html", "x.html"], "cannot show a sweep"),
            (["--compare", "block_size=16", "--perfetto", "x"], "--perfetto shows one run"),
            (["--jobs", "2"], "--jobs sets the processes of a sweep"),
            (["--model", "m"], "--model configures a live run: it needs --against URL"),
            (["--against", "http://127.0.0.1:1", "--set", "block_size=8"], "--set configures a simulated engine"),
            (["--against", "http://127.0.0.1:1", "--cost", "constant:3"], "--cost configures a simulated engine"),
            (
                ["--against", "http://127.0.0.1:1", "--perfetto", "x"],
                "--perfetto shows steps, which a client cannot see",
            ),
        ],
    )
    def test_rejects_contradicting_flags(self, replay: Replay, mooncake: Path, words: list[str], reason: str) -> None:
        status, out, err = replay(mooncake, *words)
        assert (status, out) == (2, "")
        assert reason in err and err.count("\n") == 1

    @pytest.mark.parametrize("flag", ["--json", "--html", "--perfetto"])
    def test_rejects_missing_output_folder_before_the_run(
        self, replay: Replay, tmp_path: Path, mooncake: Path, flag: str
    ) -> None:
        status, out, err = replay(mooncake, flag, tmp_path / "none" / "file")
        assert (status, out) == (78, "") and " not found" in err
        status, out, err = replay(mooncake, flag, tmp_path)
        assert (status, out) == (78, "") and "is a folder" in err

    def test_format_choices_equal_loaders(self) -> None:
        from quire.replay.arguments import FORMATS
        from quire.replay.formats.detect import FORMATS as known

        assert ("auto", *known) == FORMATS


def read_json(text: str) -> Any:
    """Parse one line of JSON without NaN."""
    assert text.count("\n") == 1

    def check_error(word: str) -> Any:
        raise AssertionError(word)

    return json.loads(text, parse_constant=check_error)


class TestWhatIf:
    FLAGS = ("--set", "block_size=512", "--set", "num_usable_blocks=10", "--cost", "constant:10")

    def test_json_on_stdout_is_the_only_output(self, replay: Replay, mooncake: Path) -> None:
        status, out, err = replay(mooncake, *self.FLAGS, "--concurrency", 1, "--json", "-")
        found = read_json(out)
        assert (status, err) == (0, "")
        assert found["prefix_cache"]["hit_blocks"] == found["prefix_cache"]["requests_with_hit"] == 7
        assert found["prefix_cache"]["input_tokens"] == sum(range(700, 708))
        assert (found["requests"], found["rejected"], found["preemptions"]) == (8, 0, 0)
        assert found["output_tokens"] == sum(range(3, 11))
        assert found["decisions_equal"] is None and found["settings"]["block_size"] == 512
        assert found["latency_ms"]["tpot"]["p50"] == pytest.approx(10.0)

    def test_prints_tables_and_writes_json(self, replay: Replay, mooncake: Path, tmp_path: Path) -> None:
        file = tmp_path / "out.json"
        status, out, _ = replay(mooncake, *self.FLAGS, "--json", file)
        assert status == 0 and "time to first token, ms" in out and "constant: 10 ms per step" in out
        first = read_json(file.read_text())
        assert replay(mooncake, *self.FLAGS, "--json", file)[0] == 0
        again = read_json(file.read_text())
        for clock in ("wall_s", "speedup"):
            del first[clock], again[clock]
        assert first == again

    def test_handles_overlong_prompts(self, replay: Replay, mooncake: Path) -> None:
        flags = (*self.FLAGS, "--set", "max_model_len=709", "--json", "-")
        refused = read_json(replay(mooncake, *flags)[1])
        assert (refused["requests"], refused["rejected"]) == (8, 4)
        dropped = read_json(replay(mooncake, *flags, "--overlong", "drop")[1])
        assert (dropped["requests"], dropped["rejected"]) == (4, 0)
        clipped = read_json(replay(mooncake, *flags, "--overlong", "clip")[1])
        assert (clipped["requests"], clipped["rejected"]) == (8, 0)

    def test_runs_synthetic_workload(self, replay: Replay) -> None:
        spec = "synthetic:requests=5,arrivals=constant:2,input=fixed:40,output=fixed:3"
        _, out, _ = replay(spec, "--cost", "constant:10", "--json", "-")
        found = read_json(out)
        assert (found["requests"], found["prefix_cache"]["input_tokens"], found["output_tokens"]) == (5, 200, 15)

    def test_writes_html_and_perfetto(self, replay: Replay, mooncake: Path, tmp_path: Path) -> None:
        page, trace = tmp_path / "run.html", tmp_path / "run.json"
        assert replay(mooncake, *self.FLAGS, "--html", page, "--perfetto", trace)[0] == 0
        assert page.read_text().startswith("<!doctype html>") or page.read_text().startswith("<!DOCTYPE html>")
        assert json.loads(trace.read_text())["traceEvents"]


class TestBadInput:
    """Every error is one line without a traceback."""

    def check_error(self, replay: Replay, reason: str, *words: object, status: int = 78) -> None:
        got, out, err = replay(*words)
        assert (got, out) == (status, ""), err
        assert err.startswith("quire: error: ") and err.count("\n") == 1
        assert reason in err, err

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "the file is empty"),
            (b"\x00\x01\x02\xff" * 50, "unknown trace format"),
            (b'{"timestamp": 0, "input_len', "invalid JSON"),
            (b"\x1f\x8b\x08\x00broken", "cut short or damaged"),
            (b'{"timestamp": 0, "input_length": -3, "output_length": 1, "hash_ids": []}\n', ":1: "),
        ],
    )
    def test_rejects_bad_files(self, replay: Replay, tmp_path: Path, content: bytes, reason: str) -> None:
        path = tmp_path / "file"
        path.write_bytes(content)
        self.check_error(replay, reason, path)
        self.check_error(replay, reason, path, "--cost", "constant:1")

    def test_rejects_bad_output_paths(self, replay: Replay, tmp_path: Path) -> None:
        self.check_error(replay, "file or folder not found", tmp_path / "none")
        self.check_error(replay, "contains no trace file", tmp_path)

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (["--set", "block_size=many"], "block_size"),
            (["--compare", "block_siz=16"], "did you mean block_size?"),
            (["--cost", "constant:fast"], "constant"),
            (["--cost", "fitted:none"], "none"),
            (["--start", "1000"], "none of its 8 requests is in the window"),
            (["--closed-loop", "--limit", "2", "--cost", "roofline:none,h200"], "none"),
        ],
    )
    def test_rejects_bad_settings(self, replay: Replay, mooncake: Path, words: list[str], reason: str) -> None:
        self.check_error(replay, reason, mooncake, *words)

    def test_rejects_missing_server(self, replay: Replay, mooncake: Path) -> None:
        self.check_error(replay, "cannot reach the server", mooncake, "--against", "http://127.0.0.1:9")
        self.check_error(replay, "must start with http://", mooncake, "--against", "localhost:9")

    def test_lenient_skips_bad_line(self, replay: Replay, mooncake: Path) -> None:
        mooncake.write_text(mooncake.read_text().replace('"input_length": 703', '"input_length": -703'))
        self.check_error(replay, ":4: ", mooncake, "--cost", "constant:1")
        found = read_json(replay(mooncake, "--cost", "constant:1", "--lenient", "--json", "-")[1])
        assert found["requests"] == 7 and any("1 bad line was skipped" in note for note in found["notes"])


class TestExact:
    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        driver = Driver(num_blocks=12, block_size=4, max_num_seqs=4, async_scheduling=True)
        for index in range(6):
            driver.add(f"r{index}", list(range(index, index + 9)), max_tokens=12, priority=index % 2)
        driver.run()
        path = tmp_path / "trace.jsonl"
        path.write_bytes(b"".join(encode_line(line) + b"\n" for line in driver.lines()))
        return path

    def test_reports_equal_decisions(self, replay: Replay, trace: Path) -> None:
        status, out, err = replay(trace)
        assert (status, err) == (0, "") and "replayed exactly: all decisions are equal" in out
        found = read_json(replay(trace, "--json", "-")[1])
        assert (found["decisions_equal"], found["first_difference"], found["requests"]) == (True, None, 6)
        assert found["preemptions"] > 0 and found["num_usable_blocks"] == 11

    def test_reports_that_nothing_was_replayed(self, replay: Replay, trace: Path) -> None:
        trace.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:2]))  # the header and an arrival
        status, out, err = replay(trace)
        assert status == 1 and "replayed exactly" not in out and "nothing was replayed" in err
        assert read_json(replay(trace, "--json", "-")[1])["decisions_equal"] is None

    def test_reports_beam_searches_and_forks_as_one_request_each(self, replay: Replay, tmp_path: Path) -> None:
        driver = Driver(num_blocks=40, async_scheduling=True)
        driver.add("search", [1, 2, 3, 4, 5], max_tokens=9, use_beam_search=True, beam_width=3)
        driver.add("one", [7, 8, 9], max_tokens=9)
        driver.add("two", [], max_tokens=9, forked_from="one")
        driver.run()
        path = tmp_path / "searches.jsonl"
        path.write_bytes(b"".join(encode_line(line) + b"\n" for line in driver.lines()))
        status, out, _ = replay(path)
        assert (status, "all decisions are equal" in out) == (0, True)
        assert re.search(r"requests +3\n", out)

    def test_reports_first_difference(self, replay: Replay, trace: Path) -> None:
        lines = trace.read_bytes().splitlines()
        at, line = next(
            (at, line)
            for at, line in enumerate(map(decode_line, lines))
            if isinstance(line, StepDecision) and line.appended
        )
        appended = [*line.appended[:-1], line.appended[-1] + 1]
        lines[at] = encode_line(msgspec.structs.replace(line, appended=appended, crc=None))
        trace.write_bytes(b"\n".join(lines))
        status, out, err = replay(trace, "--json", "-")
        found = read_json(out)
        assert (status, found["decisions_equal"]) == (1, False)
        difference = found["first_difference"]
        assert (difference["file"], difference["line"], difference["step"], difference["kind"]) == (
            trace.name,
            at + 1,
            line.step,
            "step_decision",
        )
        assert difference["recorded"] == difference["decided"] + 1 and difference["field"].startswith("appended")
        assert found["steps"] < line.step and "end at the first difference" in found["notes"][0]
        assert f"decisions differ first at step {line.step}: step_decision appended" in err and err.count("\n") == 1

    def test_any_setting_makes_a_what_if_run(self, replay: Replay, trace: Path) -> None:
        found = read_json(replay(trace, "--set", "num_usable_blocks=50", "--cost", "constant:1", "--json", "-")[1])
        assert found["decisions_equal"] is None and found["preemptions"] == 0
        assert (found["num_usable_blocks"], found["block_size"], found["requests"]) == (50, 4, 6)
        assert found["output_tokens"] == 72

    def test_a_change_of_settings_is_beside_the_recorded_ones(
        self, replay: Replay, trace: Path, tmp_path: Path
    ) -> None:
        """Recorded; the recorded settings and the changed ones by one cost model."""
        page, flags = tmp_path / "two.html", ("--set", "num_usable_blocks=50", "--cost", "constant:1")
        status, out, _ = replay(trace, *flags, "--html", page, "--perfetto", tmp_path / "changed.json")
        assert status == 0 and out.startswith("quire: open loop with num_usable_blocks=50\n")
        assert "latency, mean              recorded" in out and "base  changed" in out
        assert "open loop against quire: open loop with num_usable_blocks=50" in page.read_text()
        found = read_json(replay(trace, *flags, "--json", "-")[1])
        recorded, base = found["recorded"], found["base"]
        assert (recorded["decisions_equal"], base["decisions_equal"]) == (True, None)
        assert [each["num_usable_blocks"] for each in (recorded, base, found)] == [11, 11, 50]
        assert base["cost"] == found["cost"] and base["preemptions"] > 0 == found["preemptions"]
        assert "note: base and changed are simulated with the same cost model" in out

    def test_recorded_figures_of_other_requests_are_left_out(self, replay: Replay, trace: Path) -> None:
        status, out, _ = replay(trace, "--set", "num_usable_blocks=50", "--cost", "constant:1", "--limit", 3)
        assert status == 0 and "recorded" not in out.split("\n\n")[1] and "--limit was given" in out

    def test_notes_limit(self, replay: Replay, trace: Path) -> None:
        trace.write_bytes(trace.read_bytes()[:-40])
        status, out, err = replay(trace)
        assert (status, out) == (78, "") and err.startswith("quire: error: ") and err.count("\n") == 1
        status, out, _ = replay(trace, "--lenient")
        assert status == 0 and "note: " in out


class BusyEngine(EndlessEngine):
    """A stub server that rejects prompts of 703 tokens."""

    async def add(self, request: AddRequest, *rest: Any, **more: Any) -> EndlessSequence:
        if len(request.prompt_token_ids) == 703:
            raise InvalidRequest("too many wait", None, "queue_full")
        return await super().add(request, *rest, **more)


class TestLive:
    @pytest.fixture
    def url(self) -> Iterator[str]:
        front_end = FrontEnd(BusyEngine(max_model_len=709, vocab_size=1024))
        yield f"http://127.0.0.1:{front_end.port}"
        front_end.close()

    def test_has_the_outputs_of_a_simulation(self, replay: Replay, mooncake: Path, tmp_path: Path, url: str) -> None:
        page = tmp_path / "live.html"
        status, out, err = replay(mooncake, "--against", url, "--concurrency", 2, "--json", "-", "--html", page)
        found = read_json(out)
        assert (status, err) == (1, "") and found["errors"] == {"http 503 queue_full": 1}
        assert found["finish_reasons"] == {"error": 1, "length": 3, "rejected": 4}
        assert found["output_tokens"] == 3 + 4 + 5 and found["steps"] is None and page.stat().st_size > 1000

    def test_prints_tables_of_a_live_run(self, replay: Replay, mooncake: Path, url: str) -> None:
        status, out, err = replay(mooncake, "--against", url, "--rate", 5, "--limit", 3, "--overlong", "drop")
        assert (status, err) == (0, "") and "mooncake trace against endless" in out and "end-to-end latency, ms" in out
        assert "steps" not in out.split("\n\n")[2]


class TestSeveralRuns:
    FLAGS = ("--set", "block_size=512", "--cost", "constant:10")

    @pytest.mark.full
    def test_sweep_has_a_row_per_combination_and_names_failures(
        self, replay: Replay, mooncake: Path, tmp_path: Path
    ) -> None:
        axes = ("--sweep", "num_usable_blocks=2,10", "--sweep", "max_num_seqs=1,8,0", "--jobs", 2)
        status, out, _ = replay(mooncake, *self.FLAGS, *axes, "--json", tmp_path / "rows.json")
        rows = read_json((tmp_path / "rows.json").read_text())
        values = [(row["set"]["num_usable_blocks"], row["set"]["max_num_seqs"]) for row in rows]
        assert (status, values) == (1, [(blocks, seqs) for blocks in ("2", "10") for seqs in ("1", "8", "0")])
        assert [row.get("requests") for row in rows] == [8, 8, None] * 2
        assert rows[0]["latency_ms"]["queue"]["mean"] > rows[4]["latency_ms"]["queue"]["mean"] == 0.0
        assert "--max-num-seqs must be from 1" in rows[2]["error"]
        table = [line.split()[1:3] for line in out.split("\n\n")[1].splitlines()[1:]]
        assert table[2] == table[5] == ["max_num_seqs=0", "failed"]
        assert table[4] == ["max_num_seqs=8", "63.68%"]
        assert "note: num_usable_blocks=2 max_num_seqs=0: " in out

    def test_comparison_names_slower_requests_and_reasons(self, replay: Replay, mooncake: Path, tmp_path: Path) -> None:
        flags = (*self.FLAGS, "--set", "num_usable_blocks=10", "--compare", "max_num_seqs=1")
        status, out, _ = replay(mooncake, *flags, "--html", tmp_path / "two.html")
        assert status == 0 and (tmp_path / "two.html").stat().st_size > 1000
        assert "num_usable_blocks=10, max_num_seqs=1" in out
        assert "\n  max_num_seqs: 256 -> 1\n" in out and "\ntook longer" in out and "\\n" not in out
        found = read_json(replay(mooncake, *flags, "--json", "-")[1])
        assert [run["settings"]["max_num_seqs"] for run in found["runs"]] == [256, 1]
        assert found["comparison"]["slower"] == 4 and found["comparison"]["most_delayed"][0]["why"]
