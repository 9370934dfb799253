"""Errors of a trace name file and line; lenient readers skip damaged lines."""

import gzip
import lzma
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scheduler_driver import Driver
from traced_runs import encoded, write_trace

from quire.protocol.errors import ConfigError
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader, is_trace
from quire.scheduler_proc.trace.lines import End, Lost, StepDecision, encode_line


def some_lines() -> list[Any]:
    driver = Driver(async_scheduling=True)
    for index in range(3):
        driver.add(f"r{index}", [index, 1, 2, 3, 4], max_tokens=9)
    driver.run()
    return driver.lines()


def raw_lines() -> list[bytes]:
    return encoded(some_lines())


def joined(raw: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in raw)


def written(tmp_path: Path, data: bytes, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def parts(tmp_path: Path, cuts: tuple[int, ...] = (10, 25)) -> Path:
    """Write a trace in several files, as rotation does."""
    header, *rest = some_lines()
    path = tmp_path / "trace"
    for part, (begin, end) in enumerate(zip((0, *cuts), (*cuts, len(rest)), strict=True)):
        last = [End(now=0.0, next_part=end < len(rest))]
        name = path if not part else tmp_path / f"trace.{part}"
        write_trace(name, [msgspec.structs.replace(header, part=part), *rest[begin:end], *last])
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_reads_compressed_file_of_any_name(tmp_path: Path, pack: Any) -> None:
    raw = raw_lines()
    reader = TraceReader(written(tmp_path, pack(joined(raw)), "noname"))
    entries = list(reader)
    assert [line.number for line in entries] == list(range(1, len(raw) + 1)) and {line.file for line in entries} == {
        "noname"
    }
    assert encoded(line.line for line in entries) == encoded(some_lines())
    assert all(line.is_intact for line in entries)


def test_reads_all_frames_of_a_zstd_file(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    raw = raw_lines()
    frames = [zstandard.ZstdCompressor().compress(line + b"\n") for line in raw]
    packed, middle = b"".join(frames), sum(map(len, frames[:9]))
    assert replay_lines(TraceReader(written(tmp_path, packed))) is None
    assert len(list(TraceReader(written(tmp_path, packed)))) == len(raw)
    for bad in (packed[:middle] + b"xxxxxxx" + packed[middle + 7 :], packed[:-3]):
        path = written(tmp_path, bad)
        with pytest.raises(ConfigError, match=r":\d+: the compressed data is damaged or cut short"):
            list(TraceReader(path))
        reader = TraceReader(path, lenient=True)
        assert 1 < len(list(reader)) <= len(raw) and reader.num_left_out == 1
    large = zstandard.ZstdCompressor().compress(joined(raw * 50))
    assert len(list(TraceReader(written(tmp_path, large)))) == 50 * len(raw)


def test_ignores_spaces(tmp_path: Path) -> None:
    raw = raw_lines()
    raw[4] = raw[4].replace(b",", b" , ").replace(b":", b": ")
    assert replay_lines(TraceReader(written(tmp_path, joined(raw)))) is None


@pytest.mark.parametrize("folder", [False, True])
def test_reads_rotated_files_as_one_trace(tmp_path: Path, folder: bool) -> None:
    path = parts(tmp_path)
    (tmp_path / "notes.txt").write_text("not a trace")
    reader = TraceReader(tmp_path if folder else path)
    assert replay_lines(reader) is None and not reader.notes
    assert [file.name for file in reader.files] == ["trace", "trace.1", "trace.2"]
    assert sum(isinstance(entry.line, StepDecision) for entry in reader) == sum(
        isinstance(line, StepDecision) for line in some_lines()
    )


def test_orders_parts_by_number(tmp_path: Path) -> None:
    path = parts(tmp_path, tuple(range(2, 24, 2)))
    reader = TraceReader(path)
    assert [file.name for file in reader.files[-3:]] == ["trace.9", "trace.10", "trace.11"]
    assert replay_lines(reader) is None


def test_names_missing_part(tmp_path: Path) -> None:
    path = parts(tmp_path)
    (tmp_path / "trace.1").unlink()
    with pytest.raises(ConfigError, match=r"trace\.2 is part 2, not 1 of the trace"):
        list(TraceReader(path))
    reader = TraceReader(path, lenient=True)
    assert len(list(reader)) == 12 and "not 1 of the trace" in reader.notes[0]
    (tmp_path / "trace.2").unlink()
    with pytest.raises(ConfigError, match="is not the last part of the trace"):
        list(TraceReader(path))
    path.unlink()
    parts(tmp_path)
    with pytest.raises(ConfigError, match=r"trace\.1 is part 1 of a trace; the parts before it are missing"):
        TraceReader(tmp_path / "trace.1")


def test_ignores_part_of_an_older_trace(tmp_path: Path) -> None:
    path = parts(tmp_path)
    write_trace(path, [*some_lines(), End(now=0.0)])
    reader = TraceReader(path)
    assert replay_lines(reader) is None
    assert reader.notes == [f"{path} is the last part; {path}.1 belongs to another trace"]


def test_rejects_folder_with_two_traces_or_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no Quire trace"):
        TraceReader(tmp_path)
    for name in "ab":
        write_trace(tmp_path / name, some_lines())
    with pytest.raises(ConfigError, match="contains 2 traces: name one of them, such as a"):
        TraceReader(tmp_path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty"),
        (b"hello\n", "1: not the header of a Quire trace .no format"),
        (b'{"kind":"tick","now":1.0}\n', "1: not the header"),
        (b'{"kind":"header","format":"other","version":1}\n', "format 'other'"),
        (
            b'{"kind":"header","format":"quire-trace","version":9}\n',
            "has version 9 of the trace format; .* versions 1 to 4",
        ),
        (b'{"kind":"header","format":"quire-trace","version":1}\n', "1: the line is damaged: .*missing required field"),
        (b"\x1f\x8b\x00", "damaged or cut short"),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_rejects_files_that_are_no_trace(tmp_path: Path, data: bytes, text: str, lenient: bool) -> None:
    path = written(tmp_path, data)
    with pytest.raises(ConfigError, match=text) as caught:
        TraceReader(path, lenient=lenient)
    assert str(path) in str(caught.value)


def test_names_the_removed_eviction_policy(tmp_path: Path) -> None:
    raw = raw_lines()
    fields = msgspec.json.decode(raw[0])
    del fields["crc"]
    for policy in ("lru", "value"):
        fields["config"]["eviction_policy"] = policy
        path = written(tmp_path, joined([msgspec.json.encode(fields), *raw[1:]]), policy)
        if policy == "lru":
            assert replay_lines(TraceReader(path)) is None
        else:
            with pytest.raises(ConfigError, match="value was recorded with --eviction-policy value, which was removed"):
                TraceReader(path)


def test_rejects_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file not found"):
        TraceReader(tmp_path / "nothing")
    assert not is_trace(tmp_path / "nothing") and not is_trace(written(tmp_path, b"{}"))
    assert is_trace(written(tmp_path, b'{"kind":"header","format":"quire-trace","version":9}\n'))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda line: line[: len(line) // 2], "the line is damaged"),
        (lambda line: b"", "the line is damaged"),
        (lambda line: line.replace(b'"kind":"', b'"kind":"un'), "the line is damaged: Invalid value 'un"),
        (lambda line: line.replace(b'"now":', b'"then":'), "the line is damaged: .*missing required field `now`"),
        (lambda line: line.replace(b'"step":', b'"step":1'), "the line was altered: its checksum does not match"),
        (lambda line: b"\xff" + line, "the line is damaged"),
    ],
)
def test_damaged_line_raises_or_is_skipped(tmp_path: Path, damage: Any, text: str) -> None:
    raw = raw_lines()
    at = next(at for at, line in enumerate(raw) if b"step_decision" in line)
    raw[at] = damage(raw[at])
    path = written(tmp_path, joined(raw))
    with pytest.raises(ConfigError, match=f":{at + 1}: {text}"):
        list(TraceReader(path))
    reader = TraceReader(path, lenient=True)
    entries = list(reader)
    assert len(entries) == len(raw) and entries[at].line == Lost(lines=1)
    assert reader.num_left_out == 1 and f":{at + 1}: the line" in reader.notes[0]


def test_handles_truncation_at_every_byte(tmp_path: Path) -> None:
    """Whole lines are kept, and a truncated line is reported."""
    raw = raw_lines()
    data = joined(raw)
    whole = {len(joined(raw[:count])): count for count in range(1, len(raw) + 1)}
    for end in range(len(raw[0]) + 1, len(data), 97):
        path = written(tmp_path, data[:end])
        count = sum(length <= end for length in whole)
        reader = TraceReader(path, lenient=True)
        entries = list(reader)
        assert len(entries) == count + (end not in whole) and reader.notes
        if end not in whole and data[end] not in b"\n":
            with pytest.raises(ConfigError, match=f":{count + 1}: the line is cut short"):
                list(TraceReader(path))


def test_notes_missing_end_line(tmp_path: Path) -> None:
    lines = [line for line in some_lines() if not isinstance(line, End)]
    reader = TraceReader(write_trace(tmp_path / "trace", lines))
    assert replay_lines(reader) is None
    assert reader.notes == [f"{tmp_path / 'trace'} has no end line: it was cut short or is still being written"]


def test_accepts_line_without_checksum(tmp_path: Path) -> None:
    lines = some_lines()
    bare = [msgspec.json.encode(msgspec.structs.replace(line, crc=None), enc_hook=np.ndarray.tolist) for line in lines]
    assert replay_lines(TraceReader(written(tmp_path, joined(bare)))) is None
    assert encode_line(msgspec.structs.replace(lines[1], crc=None)) == raw_lines()[1]
