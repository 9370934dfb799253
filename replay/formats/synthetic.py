"""Synthetic workloads: ``synthetic:requests=500,arrivals=gamma:4:2,input=lognormal:800:1,output=fixed:128``."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.protocol.errors import ConfigError, did_you_mean
from quire.replay.formats.arrivals import Lengths, parse_arrivals, parse_lengths
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import MAX_TOKENS, Faults, finish
from quire.replay.workload.workload import Call, ContentIds, Workload

PREFIX = "synthetic:"
MAX_CALLS = 5_000_000
_DEFAULTS = {
    "requests": "1000",
    "arrivals": "poisson:1",
    "input": "lognormal:1024:1",
    "output": "lognormal:256:1",
    "prefix_groups": "0",
    "prefix_tokens": "0",
    "adapters": "0",
    "adapter_zipf": "1",
}


def load(path: Path, options: LoadOptions, load_other: Callable[[Path], Workload]) -> Workload:
    """Generate the workload of the spec ``path``; missing keys have the values of ``_DEFAULTS``.

    ``input`` and ``output`` may be ``file:PATH``: lengths are drawn from that trace, in pairs if both name the same
    file. Each request belongs to a random one of ``prefix_groups`` groups and begins with its group's ``prefix_tokens``
    tokens, in addition to ``input``. With ``adapters``, each has one of that number of LoRA adapters, that of rank r
    with a probability in proportion to ``1 / r ** adapter_zipf``.

    Args:
        load_other: loads the trace of a ``file:PATH``.

    Raises:
        ConfigError: an invalid spec.
    """
    given = parse_spec(str(path))
    count = _whole(given, "requests", 1, MAX_CALLS)
    random = np.random.default_rng(options.seed)
    times = parse_arrivals(given["arrivals"]).times(count, random).tolist()
    inputs, outputs = _lengths(given, count, random, load_other)
    groups, prefix = _whole(given, "prefix_groups", 0, MAX_CALLS), _whole(given, "prefix_tokens", 0, 2**24)
    if (groups == 0) != (prefix == 0):
        both = f"got {groups} and {prefix}"
        raise ConfigError(f"synthetic: prefix_groups and prefix_tokens must both be 0 or both be positive ({both})")
    adapters = _adapters(given, count, options.seed)
    shared = [ContentIds(array("Q", [group]), max(1, prefix)) for group in range(groups)]
    members = random.integers(0, max(1, groups), count).tolist()
    calls = []
    for i in range(count):
        content = shared[members[i]] if groups else None
        if content is not None and adapters:
            content = ContentIds(content.ids, content.unit, space=adapters[i])
        call = Call(i, f"{i}", times[i], int(inputs[i]) + prefix, int(outputs[i]), content)
        call.adapter = f"adapter {adapters[i]}" if adapters else ""
        calls.append(call)
    shown = ",".join(f"{key}={value}" for key, value in given.items())
    note = f"synthetic workload, seed {options.seed}: {shown}"
    settings = {"enable_lora": True} if adapters else {}
    return finish(Workload("synthetic", str(path), calls, settings, [note]), options, Faults(False))


def _adapters(given: dict[str, str], count: int, seed: int) -> list[int]:
    """Return the adapter of each request, from 0; an empty list without adapters."""
    number = _whole(given, "adapters", 0, 2**20)
    try:
        exponent = float(given["adapter_zipf"])
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent <= 10:
        raise ConfigError(f"synthetic: adapter_zipf must be from 0 to 10 (got {given['adapter_zipf']!r})")
    if not number:
        return []
    weights = np.arange(1, number + 1, dtype=np.float64) ** -exponent
    drawn: list[int] = np.random.default_rng([seed, number]).choice(number, count, p=weights / weights.sum()).tolist()
    return drawn


def parse_spec(spec: str) -> dict[str, str]:
    """Parse the keys of a spec. Raises ConfigError for an unknown key or a missing ``=``."""
    given = dict(_DEFAULTS)
    for piece in filter(None, spec.removeprefix(PREFIX).split(",")):
        key, equals, value = piece.partition("=")
        if not equals or key not in given:
            known = ", ".join(_DEFAULTS)
            raise ConfigError(f"synthetic: {piece!r} is not KEY=VALUE{did_you_mean(key, given)}; known keys: {known}")
        given[key] = value
    return given


def _whole(given: dict[str, str], key: str, low: int, high: int) -> int:
    text = given[key]
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise ConfigError(f"synthetic: {key} must be a whole number from {low} to {high} (got {text!r})")
    return int(text)


def _lengths(
    given: dict[str, str], count: int, random: np.random.Generator, load_other: Callable[[Path], Workload]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the lengths of all prompts and of all answers."""
    drawn: dict[str, npt.NDArray[np.int64]] = {}
    files: dict[str, list[Call]] = {}
    lengths = []
    for key in ("input", "output"):
        kind, _, name = given[key].partition(":")
        if kind == "file":
            if name not in files:
                files[name] = load_other(Path(name)).calls
                drawn[name] = random.integers(0, len(files[name]), count)
            every = [c.num_prompt_tokens if key == "input" else c.num_output_tokens for c in files[name]]
            lengths.append(np.array(every, np.int64)[drawn[name]])
        else:
            draw: Lengths = parse_lengths(given[key], f"synthetic: {key}", MAX_TOKENS)
            lengths.append(draw(count, random))
    return lengths[0], lengths[1]
