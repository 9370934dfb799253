"""CPU seconds of the tests, per file: ``--cpu-seconds FILE`` writes them as JSON and prints a table per package.

The seconds of a test are those of its process (user and system, fixtures included), and those of child processes that
ended meanwhile. What belongs to no test, such as collecting and engines that live as long as the session, is listed as
``(no test)``.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Sums = dict[str, list[float]]
"""Path of a test file → number of tests, seconds of the process, seconds of its children."""

REST = "(no test)"
SUMS = pytest.StashKey[Sums]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="write the CPU seconds per test file to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMS] = defaultdict(lambda: [0, 0.0, 0.0])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = os.times()
    try:
        return (yield)
    finally:
        _add(item.config.stash[SUMS], item.nodeid.partition("::")[0], 1, *_seconds_since(before))


@pytest.hookimpl(trylast=True)  # fixtures of the session have ended their engines
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.pluginmanager.hasplugin("dsession"):
        return  # the processes of pytest-xdist send their own sums
    sums = session.config.stash[SUMS]
    own, children = _seconds_since()
    _add(sums, REST, 0, own - sum(each[1] for each in sums.values()), children - sum(each[2] for each in sums.values()))
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = dict(sums)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the sums of a process of pytest-xdist; a process that crashed sends none."""
    for file, of in getattr(node, "workeroutput", {}).get("cpu_seconds", {}).items():
        _add(node.config.stash[SUMS], file, *of)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    target = config.getoption("--cpu-seconds")
    if not target or not config.stash[SUMS]:
        return
    sums, packages = config.stash[SUMS], defaultdict[str, list[float]](lambda: [0, 0.0, 0.0])
    for file, of in sums.items():
        _add(packages, "/".join(Path(file).parts[:2]), *of)
    Path(target).parent.mkdir(exist_ok=True)
    Path(target).write_text(json.dumps(dict(sorted(sums.items())), indent=0))
    _add(packages, "total", *(sum(column) for column in zip(*sums.values(), strict=True)))
    terminalreporter.section("CPU seconds: tests, own, of child processes")
    for package, (count, own, children) in sorted(packages.items(), key=lambda row: row[1][1] + row[1][2]):
        terminalreporter.line(f"{package:32}{count:7.0f}{own:9.1f}{children:9.1f}")


def _seconds_since(before: os.times_result | None = None) -> tuple[float, float]:
    """Return the seconds of this process, and of its children that ended, in all or since ``before``."""
    now = os.times()
    start = before or (0.0, 0.0, 0.0, 0.0)
    return now[0] + now[1] - start[0] - start[1], now[2] + now[3] - start[2] - start[3]


def _add(sums: Sums, name: str, count: float, own: float, children: float) -> None:
    here = sums[name]
    here[0], here[1], here[2] = here[0] + count, here[1] + own, here[2] + children
