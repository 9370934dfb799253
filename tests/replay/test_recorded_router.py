"""``quire replay`` of a router's trace: every choice is compared."""

import json
from pathlib import Path

import pytest

from quire.launch.cli import main
from quire.protocol.routing import EnginePlace, RoutingConfig
from quire.protocol.wire.kv_events import BlocksRemoved, BlocksStored
from quire.protocol.wire.router_messages import Placed, Progress, Route
from quire.router_proc.core.events import CacheChanged, EngineMeasured, EnginesKnown, FrontEndDropped, RouterEvent
from quire.router_proc.core.router import Router
from quire.router_proc.trace import Chosen, RouterTrace

HASHES = [bytes([number]) * 32 for number in range(8)]
KEYS = b"".join(each[:8] for each in HASHES)
EVENTS: list[tuple[RouterEvent, int]] = [
    (EnginesKnown([EnginePlace(engine, f"/engine-{engine}", 1, "serving", 16) for engine in range(3)]), 0),
    (CacheChanged(2, [BlocksStored(HASHES[:5], 16)]), 0),
    (Route(1, 128, KEYS, "job"), 1),
    (Route(1, 64, KEYS[:16]), 2),
    (CacheChanged(2, [BlocksRemoved(HASHES[3:])]), 0),
    (EngineMeasured(1, 2.0, 1000), 0),
    (Placed(7, 0, 500), 2),
    (Progress([1], []), 1),
    (Route(2, 256, KEYS * 2, "job", adapter=b"A"), 1),
    (FrontEndDropped(1), 0),
    (Route(3, 16, KEYS[:8], excluded=[2]), 2),
]


def record(path: Path, *, num_routers: int = 1) -> None:
    config = RoutingConfig(max_loras=1)
    for incarnation in range(1, num_routers + 1):
        trace, router = RouterTrace(path, config, incarnation), Router(config)
        for event, client in EVENTS:
            trace.consumed(event, client)
            router.consume(event, client)
            for to, message in router.take_messages():
                trace.write(Chosen(message, to))
        trace.close()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "router.jsonl"
    record(path, num_routers=2)
    return path


def replay(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    status = 0
    try:
        main(["replay", *map(str, words)])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    output = capsys.readouterr()
    return status, output.out, output.err


def test_a_trace_of_two_routers_replays_exactly(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = replay(capsys, trace, "--json", "-")
    found = json.loads(out)
    assert status == 0 and found["decisions_equal"] and found["policies"] == ["cache", "cache"]
    assert found["num_questions"] == 8 and found["num_events"] == 2 * len(EVENTS)
    assert sum(found["choices"].values()) == 8 and "2 cached" in found["choices"]
    assert "all choices are equal (8 questions)" in replay(capsys, trace)[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"message":[61,1,2,"cached",80]', '"message":[61,1,1,"cached",80]'),
        ('"message":[61,1,2,"cached",80]', '"message":[61,1,2,"load",80]'),
        ("[65,2,[[50,", "[65,1,[[50,"),
        ("[60,1,128,", "[60,1,129,"),
    ],
)
def test_a_changed_line_is_found(trace: Path, capsys: pytest.CaptureFixture[str], old: str, new: str) -> None:
    text = trace.read_text()
    assert old in text
    trace.write_text(text.replace(old, new, 1))
    status, _, err = replay(capsys, trace)
    if new.startswith("[60"):
        assert status == 0  # one token more in its prompt changes no choice
    else:
        assert status == 1 and "choices differ first in line" in err and "now" in err


def test_a_trace_has_of_hashes_what_the_router_uses(trace: Path) -> None:
    line = next(line for line in trace.read_text().splitlines() if "[65," in line)
    assert '"AAAAAAAAAAA="' in line  # 8 bytes


def test_only_the_owner_can_read_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "router.jsonl"
    path.touch(mode=0o644)
    record(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_trace_that_is_cut_short_ends_there(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_bytes(trace.read_bytes()[:-20])
    status, out, _ = replay(capsys, trace)
    assert status == 0 and "is cut short" in out


@pytest.mark.parametrize(
    ("change", "words", "problem"),
    [
        (('"consumed"', '"eaten"'), [], ":2: the line is damaged"),
        (('"version":2}', '"version":1}'), [], ":1: version 1 of the format; this reads 2"),
        (('"device"', '"devise"'), [], ":3: impossible event"),
        (("", ""), ["--rate", "2"], "a router's trace can only be replayed as recorded"),
        (("", ""), ["--html", "PAGE"], "cannot show a router's trace"),
        (("", ""), ["--perfetto", "FILE"], "cannot show a router's trace"),
    ],
)
def test_bad_input_has_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: list[str], problem: str
) -> None:
    trace.write_text(trace.read_text().replace(*change, 1))
    status, _, err = replay(capsys, trace, *words)
    assert status and problem in err and err.count("\n") == 1
