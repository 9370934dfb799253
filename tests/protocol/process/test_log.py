"""Log records: one line each, with the data of an event as key=value."""

import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.protocol.process.log import (
    EventLogger,
    JsonFormatter,
    LineFormatter,
    LineHandler,
    LogOptions,
    start_logging,
)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(stream: io.StringIO) -> Iterator[EventLogger]:
    logger = logging.getLogger("quire.test_log")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield EventLogger(logger)
    logger.removeHandler(handler)


def test_one_line_has_time_level_component_and_data(log: EventLogger, stream: io.StringIO) -> None:
    log.warning("slow step", step=5, seconds=11.04321, reason='the "disk"', path="/tmp/x", empty="")
    time, rest = stream.getvalue().split(" ", 1)
    assert time.endswith("Z") and len(time) == len("2026-11-22T16:38:55.123Z")
    expected = 'slow step step=5 seconds=11.04 reason="the \\"disk\\"" path=/tmp/x empty=""\n'
    assert rest == f"WARNING quire.test_log: {expected}"


def test_data_and_tracebacks_cannot_begin_a_line(log: EventLogger, stream: io.StringIO) -> None:
    log.error("100 %s of it", text="a\nERROR quire.http: all is lost")
    try:
        raise RuntimeError("first\nsecond \x1b[31m")
    except RuntimeError:
        log.exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert "100 %s of it" in lines[0] and r"RuntimeError: first\nsecond \x1b[31m" in lines[1]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], logging.Logger]]:
    """Return a function that installs a root logger of its own; the level of the logger ``quire`` is restored."""

    def install() -> logging.Logger:
        monkeypatch.setattr(logging, "root", root := logging.Logger("root"))
        return root

    before = logging.getLogger("quire").level
    yield install
    logging.getLogger("quire").setLevel(before)


@pytest.mark.parametrize(("engine", "shown"), [("3", True), ("", False), ("x\n", False)])
def test_records_of_one_of_several_engines_have_its_number(
    monkeypatch: pytest.MonkeyPatch, root: Callable[[], logging.Logger], engine: str, shown: bool
) -> None:
    monkeypatch.setenv("QUIRE_LOG_ENGINE", engine)
    record = logging.LogRecord("quire.worker", logging.INFO, "", 0, "ready", (), None)
    for form, text in (("text", " engine=3"), ("json", '"engine": 3')):
        logger = root()
        start_logging(LogOptions("INFO", form))
        assert [text in handler.format(record) for handler in logger.handlers] == [shown]


@pytest.mark.parametrize(("name", "level"), [("", "WARNING"), ("debug", "DEBUG"), ("LOUD", "WARNING")])
def test_the_environment_sets_the_level(
    name: str,
    level: str,
    root: Callable[[], logging.Logger],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(EventLogger, "warning", lambda self, message, **data: print(message, data))
    monkeypatch.setenv("QUIRE_LOG_LEVEL", name)
    own = root()
    start_logging()
    assert logging.getLevelName(logging.getLogger("quire").level) == level
    assert own.level == logging.WARNING
    assert ("must be one of DEBUG, INFO, WARNING, ERROR {'got': 'LOUD'}" in capsys.readouterr().out) == (name == "LOUD")


def test_flags_override_the_environment_and_reach_children(
    root: Callable[[], logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LogOptions.of(None, None).level == ""
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "error")
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "text")
    assert LogOptions.of(None, None) == ("ERROR", "text")
    options = LogOptions.of("debug", "json")
    assert options.environment == {"QUIRE_LOG_LEVEL": "DEBUG", "QUIRE_LOG_FORMAT": "json"}
    own = root()
    start_logging(options)
    assert logging.getLogger("quire").level == logging.DEBUG
    assert isinstance(own.handlers[0].formatter, JsonFormatter)


def test_json_lines_hold_data_of_any_kind(log: EventLogger, stream: io.StringIO) -> None:
    for handler in logging.getLogger("quire.test_log").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
            handler.setFormatter(JsonFormatter())
    log.info("slow step", step=5, seconds=math.nan, time="mine", text="a\nb\ud800 \x1b", path=Path("/x"))
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        log.exception("failed")
    logging.getLogger("quire.test_log").info("plain %s", "text")
    lines = stream.getvalue().splitlines()
    first, second, third = (json.loads(line) for line in lines)
    assert first["message"] == "slow step" and first["component"] == "quire.test_log" and first["level"] == "INFO"
    assert first["time"].endswith("Z") and first["pid"] == os.getpid()
    assert (first["step"], first["seconds"], first["time_"], first["path"]) == (5, "nan", "mine", "/x")
    assert first["text"] == "a\nb\ud800 \x1b" and all(line.isprintable() for line in lines)
    assert "RuntimeError: first\nsecond" in second["traceback"] and third["message"] == "plain text"


def test_a_reader_that_stops_loses_lines_and_stops_nothing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as source, os.fdopen(writer, "w", buffering=1) as sink:
        handler = LineHandler()
        handler.setStream(sink)
        record = logging.LogRecord("quire.http", logging.INFO, "", 0, "x" * 1000, (), None)
        for _ in range(200):  # 200 kB into a pipe of 64 KiB
            handler.emit(record)
        os.read(reader, 2**20)
        handler.emit(record)
        assert b"log lines lost because stderr was not read count=" in source.read(2**20)
