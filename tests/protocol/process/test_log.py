"""Log records: one line each, with the data of an event as key=value."""

import io
import logging
from collections.abc import Iterator

import pytest

from quire.protocol.process.log import EventLogger, LineFormatter, start_logging


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


@pytest.mark.parametrize(("name", "level"), [("", "WARNING"), ("debug", "DEBUG"), ("LOUD", "WARNING")])
def test_the_environment_sets_the_level(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(EventLogger, "warning", lambda self, message, **data: print(message, data))
    monkeypatch.setenv("QUIRE_LOG_LEVEL", name)
    start_logging()
    assert logging.getLevelName(root.level) == level
    assert ("must be one of DEBUG, INFO, WARNING, ERROR {'got': 'LOUD'}" in capsys.readouterr().out) == (name == "LOUD")
