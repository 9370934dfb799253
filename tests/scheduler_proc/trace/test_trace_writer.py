"""The trace writer: bounded, rotating, and readable after a crash; and dumps."""

import errno
import importlib
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from scheduler_driver import Driver

from quire.protocol.errors import ConfigError
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader, read_header
from quire.scheduler_proc.trace.dump import Dump, write_dump
from quire.scheduler_proc.trace.event_log import EventLog, Record, RecordKind
from quire.scheduler_proc.trace.files import TraceFiles, part_path
from quire.scheduler_proc.trace.lines import (
    AnyLine,
    End,
    Header,
    Lost,
    StepDecision,
    Tick,
    decode_line,
    encode_line,
    is_intact,
)
from quire.scheduler_proc.trace.translate import make_header
from quire.scheduler_proc.trace.writer import TraceWriter


def header() -> Header:
    return make_header(Driver().header, 5.0, 1e9)


def files_of(path: Path, **settings: Any) -> TraceFiles:
    return TraceFiles(path, clock=lambda: 7.0, **settings)


def writer_of(path: Path, **settings: Any) -> TraceWriter:
    return TraceWriter(files_of(path), **settings)


def read(path: Path) -> list[AnyLine]:
    lines = [decode_line(raw) for raw in path.read_bytes().splitlines()]
    assert all(is_intact(line) for line in lines)
    return lines


def test_lines_are_written_in_order_with_an_end(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = writer_of(path)
    writer.begin(header())
    for index in range(100):
        writer.add(Tick(now=float(index)))
        if index % 7 == 0:
            writer.flush()
    writer.close(End(now=7.0, reason="it was stopped"))
    writer.close(End(now=8.0, reason="again"))
    first, *ticks, end = read(path)
    assert isinstance(first, Header) and (first.now, first.wall, first.part) == (5.0, 1e9, 0)
    assert [line.now for line in ticks if isinstance(line, Tick)] == [float(i) for i in range(100)]
    assert isinstance(end, End) and (end.now, end.reason, end.next_part) == (7.0, "it was stopped", False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and writer.lost == 0


def test_an_existing_file_is_emptied_and_made_private(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old\n" * 1000)
    path.chmod(0o644)
    files_of(path).close()
    assert path.read_bytes() == b"" and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["no/such/folder", "."])
def test_an_unwritable_file_is_refused_with_its_flag(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--trace .* cannot be written: "):
        files_of(tmp_path / name)


def test_each_part_continues_the_previous_one(tmp_path: Path) -> None:
    """Each is as large as configured, plus one batch."""
    path = tmp_path / "t.jsonl"
    files = files_of(path, max_bytes=4096)
    files.begin(header())
    for index in range(300):
        files.write(encode_line(Tick(now=float(index))) + b"\n")
    files.close()
    parts = [part_path(path, index) for index in range(len(list(tmp_path.iterdir())))]
    ticks: list[float] = []
    for index, file in enumerate(parts):
        first, *lines = read(file)
        assert isinstance(first, Header) and first.part == index and 0 < file.stat().st_size < 4300
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        ticks += [line.now for line in lines if isinstance(line, Tick)]
        ends = [line for line in lines if isinstance(line, End)]
        assert [end.next_part for end in ends] == [True] * (index < len(parts) - 1)
    assert len(parts) > 2 and ticks == [float(i) for i in range(300)]


def write_part(path: Path, *, is_restart: bool, wall: float, max_bytes: int = 0) -> None:
    """Write a header and a line as a scheduler does that dies then. ``max_bytes`` 1: in two parts."""
    files = files_of(path, is_restart=is_restart, max_bytes=max_bytes)
    files.begin(make_header(Driver().header, 5.0, wall))
    files.write(encode_line(Tick(now=6.0)) + b"\n")
    files.close()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_a_restarted_scheduler_begins_the_next_part(tmp_path: Path, name: str) -> None:
    """The parts of the previous schedulers are kept; those of an older trace under the same name are overwritten."""
    pytest.importorskip("zstandard")
    path = tmp_path / name
    for wall in (1e9, 2e9):  # the second trace overwrites the first
        write_part(path, is_restart=False, wall=wall, max_bytes=1)
        write_part(path, is_restart=True, wall=wall + 7)
        part_path(path, 3).write_bytes(b"")  # of a scheduler that died before its header was written
        write_part(path, is_restart=True, wall=wall + 9, max_bytes=1)
        headers = [read_header(part_path(path, part)) for part in range(5)]
        assert [header.part for header in headers] == [0, 1, 2, 3, 4]
        assert [header.trace_id for header in headers] == [wall] * 5
        assert [header.restarted for header in headers] == [False, False, True, True, False]
        assert sum(isinstance(entry.line, Tick) for entry in TraceReader(path)) == 3


@pytest.mark.parametrize("content", [None, b"", b"something else\n"])
def test_a_restarted_scheduler_without_a_trace_to_continue_begins_the_first_part(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    write_part(path, is_restart=True, wall=1e9)
    first = read_header(path)
    assert first.part == 0 and not first.restarted and list(tmp_path.iterdir()) == [path]


def test_a_restarted_scheduler_does_not_read_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    try:
        write_part(path, is_restart=True, wall=1e9)
        assert os.read(descriptor, 2**16).startswith(b'{"kind":"header"')
    finally:
        os.close(descriptor)


def test_a_slow_disk_drops_lines_and_counts_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    writer = writer_of(path, max_buffered=4000)
    with caplog.at_level(logging.ERROR):
        for index in range(1000):  # the writing thread is not running
            writer.add(Tick(now=float(index)))
            writer.flush()
    kept = 1000 - writer.lost
    assert 20 < kept < 200 and caplog.text.count("trace lines dropped") == 1
    writer.write_buffer()
    writer.add(Tick(now=1000.0))
    writer.flush()
    writer.write_buffer()
    lines = read(path)
    assert [line.now for line in lines[:kept] if isinstance(line, Tick)] == [float(i) for i in range(kept)]
    assert isinstance(lines[kept], Lost) and lines[kept].lines == writer.lost == 1000 - kept
    assert isinstance(lines[-1], Tick) and len(lines) == kept + 2
    writer.close(End(now=9.0))


class FullDisk(TraceFiles):
    def write(self, lines: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_only_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TraceWriter(FullDisk(tmp_path / "t.jsonl"))
    with caplog.at_level(logging.ERROR):
        for index in range(50):
            writer.add(Tick(now=float(index)))
            writer.flush()
            writer.write_buffer()
    assert caplog.text.count('trace ended: cannot write reason="No space left on device"') == 1
    assert writer.lost == 49 and caplog.text.count("trace lines dropped") == 1
    writer.close(End(now=0.0))


def test_a_line_that_fails_to_encode_ends_only_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = writer_of(tmp_path / "t.jsonl")
    writer.begin(header())
    writer.add(Tick(now=1.0))
    writer.flush()
    with caplog.at_level(logging.CRITICAL):
        writer.put((header, ("too", "many")))
        writer.flush()
    writer.add(Tick(now=2.0))
    writer.close(End(now=9.0))
    assert [type(line) for line in read(tmp_path / "t.jsonl")] == [Header, Tick] and writer.lost == 3


def test_a_truncated_trace_can_be_read(tmp_path: Path) -> None:
    """Between two batches the file has whole lines, or whole frames."""
    pytest.importorskip("zstandard")
    for name in ("t.jsonl", "t.jsonl.zst"):
        files = files_of(tmp_path / name)
        files.begin(header())
        writer = TraceWriter(files)
        for index in range(20):
            writer.add(Tick(now=float(index)))
            writer.flush()
            writer.write_buffer()
            seen = [entry.line for entry in TraceReader(tmp_path / name, lenient=True)]
            assert len(seen) == index + 2
        writer.close(End(now=9.0))


def test_a_compressed_file_is_smaller_with_equal_content(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    driver = Driver(async_scheduling=True)
    for index in range(8):
        driver.add(f"r{index}", [index] * 9, max_tokens=60)
    driver.run()
    first, *lines = driver.lines()
    assert isinstance(first, Header)
    for name in ("t.jsonl", "t.jsonl.zst", "parts.jsonl.zst"):
        files = files_of(tmp_path / name, max_bytes=2000 if "parts" in name else 0)
        files.begin(first)
        for index in range(0, len(lines), 40):
            files.write(b"".join([encode_line(line) + b"\n" for line in lines[index : index + 40]]))
        files.close()
        assert replay_lines(TraceReader(tmp_path / name)) is None
    assert (tmp_path / "t.jsonl.zst").stat().st_size < (tmp_path / "t.jsonl").stat().st_size / 2
    assert len(list(tmp_path.glob("parts*"))) > 2


def test_the_error_names_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'quire-serve\[trace\]'"):
        files_of(tmp_path / "t.zst")
    assert not list(tmp_path.iterdir())


# ---- dumps


def dump_of(driver: Driver, log: EventLog | None = None) -> Dump:
    log = driver.log if log is None else log
    return Dump(driver.header, list(log), log.complete, 9.0, "engine: it broke")


def busy_driver() -> Driver:
    driver = Driver(async_scheduling=True, num_blocks=20)
    for index in range(6):
        driver.add(f"r{index}", [index] * 9, max_tokens=20)
    driver.run()
    return driver


def test_a_dump_is_a_trace_that_replays(tmp_path: Path) -> None:
    path = write_dump(tmp_path / "a" / "b", 3, dump_of(busy_driver()))
    assert path is not None and path.name == f"quire-dump-{os.getpid()}-3.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert replay_lines(TraceReader(path)) is None
    end = read(path)[-1]
    assert isinstance(end, End) and end.reason == "engine: it broke"


def test_a_dump_without_its_beginning_is_incomplete(tmp_path: Path) -> None:
    driver = busy_driver()
    ring = EventLog(max_bytes=3000)
    for record in driver.log:
        ring._append(record)
    assert not ring.complete
    path = write_dump(tmp_path, 1, dump_of(driver, ring))
    assert path is not None
    first, *lines = read(path)
    assert isinstance(first, Header) and not first.complete
    assert sum(isinstance(line, StepDecision) for line in lines) == sum(r.kind == RecordKind.PRODUCED for r in ring) > 3
    with pytest.raises(ConfigError, match="begins in the middle"):
        replay_lines(TraceReader(path))


def test_the_end_of_a_dump_reports_a_failed_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = busy_driver()
    records = [*driver.log, Record(RecordKind.CONSUMED, 9.0, 0, [b"damaged"])]
    with caplog.at_level(logging.CRITICAL):
        path = write_dump(tmp_path, 1, Dump(driver.header, records, True, 9.0, "bug"))
    assert path is not None
    end = read(path)[-1]
    assert isinstance(end, End) and end.reason.startswith("bug; its replay failed with ProtocolError")


def test_a_missing_folder_loses_only_the_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.ERROR):
        assert write_dump(tmp_path / "file" / "x", 1, dump_of(busy_driver())) is None
    assert "cannot write the event dump" in caplog.text
