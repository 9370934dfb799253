"""The peer of ``quire bench scheduler``: its driver in a fresh process per section, and figures laid side by side."""

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.launch.bench.peers import find_driver, run_json
from quire.protocol.errors import ConfigError

Tree = dict[str, Any]


class SchedulerPeer:
    """An interpreter that has the peer, and the driver to run with it."""

    def __init__(self, python: Path, driver: Path) -> None:
        """Raises ConfigError when one of them cannot be used."""
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise ConfigError(f"--peer {python}: no such interpreter")
        # What the peer's driver has no section for is measured by ours around it.
        self._command = [str(python), str(find_driver(None, "vllm_scheduler.py"))]
        self._driver = str(find_driver(driver, ""))

    def measure(self, section: str) -> Tree:
        """``{"env": facts, section: figures}``; ``error`` among the figures where only our own part failed.

        Raises:
            PeerFailed: with the peer's last words.
        """
        return run_json([*self._command, section, "--driver", self._driver])


def median_of(trees: Sequence[Any]) -> Any:
    """Each figure's median over the runs; what is no figure, from the first."""
    first = trees[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for tree in trees if isinstance(tree, dict) for key in tree)
        return {key: median_of([t[key] for t in trees if isinstance(t, dict) and key in t]) for key in keys}
    numbers = [tree for tree in trees if isinstance(tree, int | float) and not isinstance(tree, bool)]
    return round(statistics.median(numbers), 3) if len(numbers) == len(trees) else first


def ratio_of(ours: Any, peer: Any) -> Any:
    """peer / ours wherever both have a figure; None where there is nothing to compare."""
    if isinstance(ours, dict) and isinstance(peer, dict):
        keys = [key for key in ours if key in peer and key not in ("env", "n") and not key.startswith("_")]
        found = {key: ratio_of(ours[key], peer[key]) for key in keys}
        return {key: value for key, value in found.items() if value is not None} or None
    figures = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (ours, peer))
    return round(peer / ours, 3) if figures and ours else None


@contextmanager
def one_core() -> Iterator[None]:
    """This process, and whatever it starts meanwhile, on one core where the system allows that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
