"""The peer of ``quire bench scheduler``: its driver and our further sections, each in a fresh process."""

import json
import os
import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.launch.bench.peers.peers import PeerFailed
from quire.protocol.errors import ConfigError

FURTHER = Path(__file__).with_name("peer_vllm_scheduler.py")
FURTHER_SECTIONS = ("admission", "hashing", "churn")
MAX_ERROR = 300

Tree = dict[str, Any]


class SchedulerPeer:
    """An interpreter that has the peer, and the driver to run with it."""

    def __init__(self, python: Path, driver: Path) -> None:
        """Raises ConfigError when either cannot be used."""
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise ConfigError(f"--peer {python}: no such interpreter")
        if not driver.is_file():
            raise ConfigError(f"--peer-driver {driver}: no such file")
        self._python, self._driver = str(python), str(driver)

    def measure(self, section: str) -> Tree:
        """``{"env": facts, section: figures}``; ``error`` among the figures where only our further part failed.

        Raises:
            PeerFailed: with the peer's last words.
        """
        found = run_json([self._python, self._driver, "--sections", section, "--clock", "cpu"])
        figures = found[section]
        if section in FURTHER_SECTIONS:
            try:
                figures |= run_json([self._python, str(FURTHER), section, "--driver", self._driver])
            except PeerFailed as error:
                figures["error"] = str(error)
        return {"env": found["env"], section: as_ours(section, figures)}


def run_json(command: Sequence[str]) -> Tree:
    """The JSON object that ends what ``command`` prints.

    Raises:
        PeerFailed: it cannot be started, fails, or prints no such thing.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        raise PeerFailed(f"{command[0]}: {error.strerror or error}") from None
    start = done.stdout.find("{")
    if done.returncode == 0 and start >= 0:
        try:
            found: Tree = json.loads(done.stdout[start:])
            return found
        except ValueError:
            pass
    raise PeerFailed(_last_words(done.stderr) or f"ended with status {done.returncode} and said nothing")


def _last_words(stderr: str) -> str:
    """The last line that names an error: libraries may still talk when the interpreter ends."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return " ".join((errors or lines or [""])[-1].split())[:MAX_ERROR]


def as_ours(section: str, found: Tree) -> Tree:
    """The peer's figures with our keys beside its own: what ours does in one piece, added up."""
    out = dict(found)
    for key, one in found.items():
        if not isinstance(one, dict):
            continue
        extra: Tree = {}
        if section == "admission" and "build_request_with_hashing" in one:
            extra["build_and_add"] = _added_up(one["build_request_with_hashing"], one["add_request"])
        if section == "churn" and "build_request_mean_us" in one:
            build = one["build_request_mean_us"]
            busy = one["scheduler_seconds"] + build * one["requests_added"] / 1e6
            extra["scheduler_seconds_incl_request_build"] = round(busy, 3)
            extra["steps_per_s_incl_request_build"] = round(one["steps"] / busy, 1)
            extra["build_and_add_mean_us"] = round(build + one["add_request_mean_us"], 2)
        if section == "wire" and "pickle_bytes" in one:
            extra = {name: one[f"pickle_{name}"] for name in ("bytes", "encode", "decode")}
        out[key] = one | extra
    return out


def _added_up(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Of two summaries: exact for means, near enough for the rest when one of the two is small."""
    return {"n": first["n"]} | {key: round(first[key] + second[key], 2) for key in first if key != "n"}


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
