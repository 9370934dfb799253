"""Bad traces: an error with file, line and field, or with lenient the good lines and a count of the bad ones."""

import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.protocol.errors import ConfigError
from quire.replay.formats.detect import FORMATS, detect_format, load_workload
from quire.replay.formats.options import LoadOptions
from quire.replay.workload.workload import Workload

DATA = Path(__file__).parents[1] / "data"
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}
REQUEST = {"t": 0, "type": "n", "in": 9, "out": 4, "hash_ids": [1, 2]}
AGENTIC = {"id": "c", "block_size": 4, "requests": [REQUEST]}
TEXT = {"timestamp": 5, "session_id": "a", "input": "One", "output": "Two"}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def load(path: Path, format: str = "auto", **options: Any) -> Workload:
    return load_workload(path, format, LoadOptions(**options))


def error_of(path: Path, format: str = "auto", **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, format, **options)
    return str(caught.value)


def bad_mooncake(**changed: Any) -> str:
    return json.dumps({**MOONCAKE, **changed})


def bad_agentic(**changed: Any) -> str:
    return json.dumps({**AGENTIC, "requests": [REQUEST, {**REQUEST, **changed}]})


CASES = [
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(input_length=-1), "input_length"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(input_length=0, hash_ids=[]), "input_length"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(input_length=2**40), "input_length"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(output_length=2**31), "output_length"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(output_length=10**400), "line"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(output_length="3"), "output_length"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(timestamp=-3), "timestamp"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(timestamp=float("nan")), "JSON is malformed"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(timestamp=float("inf")), "JSON is malformed"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(timestamp=None), "timestamp"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(hash_ids=[1]), "`hash_ids` has 1 entries; 600 tokens need 2"),
    ("mooncake", json.dumps(MOONCAKE), bad_mooncake(hash_ids=[-1, 2]), "`hash_ids` must be between 0"),
    ("mooncake", json.dumps(MOONCAKE), '{"timestamp": 3}', "missing required field `input_length`"),
    ("mooncake", json.dumps(MOONCAKE), '{"timestamp": 3', "truncated"),
    ("mooncake", json.dumps(MOONCAKE), "[" * 100_000, ""),
    ("mooncake", json.dumps(MOONCAKE), "17", "Expected `object`"),
    ("agentic", json.dumps(AGENTIC), bad_agentic(hash_ids=[1]), "request 1: `hash_ids` has 1 entries"),
    ("agentic", json.dumps(AGENTIC), bad_agentic(hash_ids=[1, -2]), "request 1: `hash_ids` must be between 0"),
    ("agentic", json.dumps(AGENTIC), bad_agentic(type="video"), "type"),
    ("agentic", json.dumps(AGENTIC), bad_agentic(think_time=-1.0), "think_time"),
    ("agentic", json.dumps(AGENTIC), bad_agentic(out=-1), "in `requests[1].out`"),
    ("agentic", json.dumps({**AGENTIC, "requests": [{**REQUEST, "t": 5}]}), bad_agentic(t=-1.0), "t"),
    ("agentic", json.dumps(AGENTIC), json.dumps({**AGENTIC, "block_size": 0}), "block_size"),
    (
        "agent-text",
        json.dumps(TEXT),
        json.dumps({**TEXT, "timestamp": -1}),
        "`timestamp` must be between 0 and 2**62 (got -1)",
    ),
    ("agent-text", json.dumps(TEXT), json.dumps({**TEXT, "input": None}), "input"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "2023-11-16 18:15:47,-7,8", "`ContextTokens` must be"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "2023-11-16 18:15:47,7,nan", "`GeneratedTokens` must be"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "2023-11-16 18:15:47,7,99999999999", "`GeneratedTokens` must be"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "2023-13-16 18:15:47,7,8", "`TIMESTAMP` must be a date and time"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "yesterday,7,8", "`TIMESTAMP` must be a date and time"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "2023-11-16 18:15:47,7", "2 fields; the header has 3"),
    ("azure", f"{AZURE}\n2023-11-16 18:15:46.6,7,8", "2023-11-16 18:15:47,7,1e3", "`GeneratedTokens` must be"),
]

SCHED_RECORDS: list[dict[str, Any]] = [
    {"event": "step_decision", "num_scheduled_tokens": {"a": 3}},
    {"event": "prefix_cache_event", "req_id": "a", "job_id": "j", "local_hit_tokens": 0, "external_hit_tokens": 0}
    | {"total_prompt_tokens": 9, "num_tokens": 9},
    {"event": "step_snapshot", "running": ["a"], "waiting": 1, "total_blocks": 9},
]
SCHED_CASES = [("sched-trace", json.dumps(record | {"step": 1, "ts": 1})) for record in SCHED_RECORDS]
EXCERPTS = ("mooncake_excerpt.jsonl", "agentic_excerpt.jsonl", "taubench_excerpt.jsonl", "azure_excerpt.csv")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**60, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize(("format", "good", "bad", "expected"), CASES)
class TestBadLines:
    def test_error_names_file_line_and_field(
        self, format: str, good: str, bad: str, expected: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(f"{good}\n\n{bad}\n{good.splitlines()[-1]}\n")
        line = 3 + good.count("\n")
        message = error_of(path)
        assert message.startswith(f"{path}:{line}: ")
        assert expected in message
        assert "\n" not in message
        assert error_of(path, format) == message

    def test_lenient_skips_bad_lines(self, format: str, good: str, bad: str, expected: str, tmp_path: Path) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(f"{good}\n{bad}\n{good.splitlines()[-1]}\n{bad}\n")
        workload = load(path, lenient=True)
        assert len(workload.calls) == 2
        (note,) = (note for note in workload.notes if "bad lines" in note)
        assert note.startswith("2 bad lines were skipped; the first: ")
        assert expected in note


class TestTimes:
    @pytest.fixture
    def azure(self, tmp_path: Path) -> Path:
        (tmp_path / "a.csv").write_text(f"{AZURE}\r\n2023-11-16 18:15:47,1,8\r\n2023-11-16 18:15:46,2,8\r\n")
        return tmp_path / "a.csv"

    @pytest.fixture
    def mooncake(self, tmp_path: Path) -> Path:
        lines = (bad_mooncake(timestamp=t, output_length=n) for t, n in ((5, 1), (5, 2), (4, 3), (5, 4)))
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        return tmp_path / "a.jsonl"

    def test_rejects_decreasing_times(self, azure: Path, mooncake: Path) -> None:
        assert error_of(azure).startswith(f"{azure}:3: `TIMESTAMP` 2023-11-16 18:15:46 is earlier")
        assert error_of(mooncake) == f"{mooncake}:3: timestamp 4 is less than 5 in the line before"

    def test_lenient_sorts_decreasing_times(self, azure: Path, mooncake: Path) -> None:
        assert [(c.arrival, c.num_prompt_tokens) for c in load(azure, lenient=True).calls] == [(0, 2), (1, 1)]
        workload = load(mooncake, lenient=True)
        assert [call.num_output_tokens for call in workload.calls] == [3, 1, 2, 4], (
            "equal times keep the order of the file"
        )
        for each in (workload, load(azure, lenient=True)):
            assert "1 line is earlier than the previous one: all were sorted by time" in each.notes


class TestCompressed:
    @pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
    def test_truncated_file_raises_or_keeps_lines_before(self, compress: Any, tmp_path: Path) -> None:
        plain = "".join(bad_mooncake(timestamp=i, hash_ids=[i * i % 97, i]) + "\n" for i in range(6000))
        path = tmp_path / "a"
        path.write_bytes(compress(plain.encode())[:-400])
        message = error_of(path, "mooncake")
        assert "cut short or damaged" in message and message.startswith(f"{path}:")
        workload = load(path, "mooncake", lenient=True)
        assert 3000 < len(workload.calls) < 6000
        assert f"{path}:{len(workload.calls) + 1}: " in message
        assert any("cut short" in note for note in workload.notes)

    @pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
    def test_rejects_damaged_file(self, compress: Any, tmp_path: Path) -> None:
        data = bytearray(compress((DATA / "mooncake_excerpt.jsonl").read_bytes() * 40))
        data[len(data) // 2] ^= 0xFF
        (tmp_path / "a").write_bytes(data)
        assert str(tmp_path / "a") in error_of(tmp_path / "a", "mooncake")
        (tmp_path / "a").write_bytes(data[:12])
        assert "cut short or damaged" in error_of(tmp_path / "a")


@pytest.mark.full
class TestZstandard:
    """The zstandard package is optional."""

    def test_names_missing_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        (tmp_path / "a").write_bytes(b"\x28\xb5\x2f\xfd....")
        assert "package zstandard is not installed" in error_of(tmp_path / "a")


class TestFiles:
    def test_rejects_missing_path(self, tmp_path: Path) -> None:
        for format in ("auto", *FORMATS[:-1]):
            assert error_of(tmp_path / "none", format) == f"{tmp_path / 'none'}: file or folder not found"

    def test_rejects_empty_file(self, tmp_path: Path) -> None:
        for name in ("a.csv", "b.jsonl"):
            (tmp_path / name).write_bytes(b"\n \n" if name == "a.csv" else b"")
            assert error_of(tmp_path / name) == f"{tmp_path / name}: the file is empty"
        for format in ("mooncake", "agentic", "agent-text", "azure", "sched-trace"):
            assert "contains no request" in error_of(tmp_path / "b.jsonl", format)

    def test_rejects_csv_without_rows_or_columns(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text(f"{AZURE}\n")
        assert "contains no request" in error_of(tmp_path / "a")
        (tmp_path / "a").write_text("TIMESTAMP,ContextTokens\n")
        assert error_of(tmp_path / "a", "azure") == f"{tmp_path / 'a'}:1: the header lacks GeneratedTokens"

    def test_rejects_unknown_formats(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("a,b\n1,2\n")
        (tmp_path / "b.json").write_text('{"a": 1}')
        (tmp_path / "c.json").write_text('{"a": ')
        (tmp_path / "d.bin").write_bytes(bytes(range(256)))
        for name in ("a.csv", "b.json", "d.bin"):
            message = error_of(tmp_path / name)
            assert "unknown trace format" in message
            assert all(format in message for format in FORMATS)
        assert error_of(tmp_path / "c.json").startswith(f"{tmp_path / 'c.json'}:1: ")
        assert "did you mean mooncake?" in error_of(tmp_path / "a.csv", "moncake")

    def test_rejects_unusable_folders(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        assert "name one of its folders: sub" in error_of(tmp_path)
        (tmp_path / "a.jsonl").write_text(json.dumps(MOONCAKE))
        assert detect_format(tmp_path) == "mooncake"
        (tmp_path / "b.csv").write_text("a,b\n")
        assert "a.jsonl: mooncake, b.csv: unknown" in error_of(tmp_path)
        (tmp_path / "a.jsonl").unlink()
        assert "contains no file of a known format" in error_of(tmp_path)

    def test_rejects_invalid_utf_8(self, tmp_path: Path) -> None:
        line = json.dumps(TEXT).encode()
        (tmp_path / "a").write_bytes(line + b"\n" + line.replace(b"One", b"\xff\xfe") + b"\n")
        assert error_of(tmp_path / "a").startswith(f"{tmp_path / 'a'}:2: ")
        assert len(load(tmp_path / "a", lenient=True).calls) == 1

    def test_rejects_window_without_requests(self) -> None:
        assert "none of its 150 requests is in the window" in error_of(DATA / "mooncake_excerpt.jsonl", start=9e5)


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0.0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"limit": 0},
        {"stagger": -1.0},
        {"seed": -1},
        {"start": -1.0},
        {"duration": 0.0},
        {"block_size": 0},
    ],
)
def test_rejects_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).replace("_", "-")):
        LoadOptions(**options)


@pytest.mark.full
class TestNoise:
    """Any wrong bytes give a workload or a ConfigError."""

    @pytest.mark.parametrize("name", EXCERPTS)
    @settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_changed_bytes_raise_only_config_errors(self, name: str, data: st.DataObject, tmp_path: Path) -> None:
        lines = (DATA / name).read_bytes().splitlines(keepends=True)[:4]
        noisy = bytearray(b"".join(line[:1500] + line[-40:] if len(line) > 2000 else line for line in lines))
        for _ in range(data.draw(st.integers(0, 3))):
            start = data.draw(st.integers(0, len(noisy)))
            noisy[start : start + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
        self.load_or_config_error(tmp_path, bytes(noisy), data)

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(case=st.sampled_from([*CASES, *SCHED_CASES]), value=VALUES, data=st.data())
    def test_changed_values_raise_only_config_errors(
        self, case: Any, value: Any, data: st.DataObject, tmp_path: Path
    ) -> None:
        good = case[1].splitlines()[-1]
        if good.startswith("{"):
            record = json.loads(good)
            record[data.draw(st.sampled_from(sorted(record)))] = value
            self.load_or_config_error(tmp_path, json.dumps(record).encode(), data)
        else:
            fields = good.split(",")
            fields[data.draw(st.integers(0, len(fields) - 1))] = str(value)
            self.load_or_config_error(tmp_path, f"{case[1]}\n{','.join(fields)}".encode(), data)

    def load_or_config_error(self, tmp_path: Path, content: bytes, data: st.DataObject) -> None:
        path = tmp_path / "a"
        path.write_bytes(content)
        format = data.draw(st.sampled_from(("auto", "mooncake", "agentic", "azure", "sched-trace")))
        try:
            workload = load(path, format, lenient=data.draw(st.booleans()))
        except ConfigError as error:
            assert str(path) in str(error)
        else:
            assert workload.calls
