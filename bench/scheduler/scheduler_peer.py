"""The peer of ``quire bench scheduler``: its driver in a fresh process per section, and comparison of figures."""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.bench.peers import find_driver, run_json
from quire.protocol.errors import ConfigError

Tree = dict[str, Any]


class SchedulerPeer:
    """A Python interpreter with the peer, and the driver to run in it."""

    def __init__(self, python: Path, driver: Path) -> None:
        """Raises ConfigError if one of them is missing or not executable."""
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise ConfigError(f"--peer {python}: not an executable file")
        # Runs the peer's driver, and measures the sections which that driver does not have.
        self._command = [str(python), str(find_driver(None, "vllm_scheduler.py"))]
        self._driver = str(find_driver(driver, ""))

    def measure(self, section: str) -> Tree:
        """Return ``{"env": facts, section: figures}``. The figures have an ``error`` if only a part of them failed.

        Raises:
            PeerFailed: with the peer's last error message.
        """
        return run_json([*self._command, section, "--driver", self._driver])


def median_of(trees: Sequence[Any]) -> Any:
    """Return the median of each number over the runs; other values are those of the first run."""
    first = trees[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for tree in trees if isinstance(tree, dict) for key in tree)
        return {key: median_of([t[key] for t in trees if isinstance(t, dict) and key in t]) for key in keys}
    numbers = [tree for tree in trees if isinstance(tree, int | float) and not isinstance(tree, bool)]
    return round(statistics.median(numbers), 3) if len(numbers) == len(trees) else first


def ratio_of(ours: Any, peer: Any) -> Any:
    """Return peer / Quire for each figure that both have, or None without such a figure."""
    if isinstance(ours, dict) and isinstance(peer, dict):
        keys = [key for key in ours if key in peer and key not in ("env", "n") and not key.startswith("_")]
        found = {key: ratio_of(ours[key], peer[key]) for key in keys}
        return {key: value for key, value in found.items() if value is not None} or None
    figures = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (ours, peer))
    return round(peer / ours, 3) if figures and ours else None


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this process and the processes that it starts to one core, if the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
