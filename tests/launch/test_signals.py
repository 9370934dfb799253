"""The signals of ``quire serve``."""

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.launch.serve import Signals


def test_a_second_signal_within_a_second_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` signals its child and the process group: two signals within a millisecond."""
    handlers: dict[int, Callable[..., Any]] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda fd: None)
    now = [0.0]
    processes: Any = SimpleNamespace(wakeup_fd=-1)
    signals = Signals(processes, lambda: now[0])
    for at, count in ((5.0, 1), (5.001, 1), (5.9, 1), (6.0, 2), (6.5, 2), (7.0, 3)):
        now[0] = at
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        assert signals.count == count
