"""Scheduling policies of other engines, for comparing a replay with a run that was measured on one.

Only replays use them (``--set like=vllm-0.19``, or one key at a time); planner.py and fifo_pool.py implement them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.routing import RoutingPolicy

Routing: TypeAlias = Literal[RoutingPolicy, "vllm"]
"""A policy of the router, or that of vLLM's client."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies in which engines differ. Each field is a key of ``--set`` in a replay; the defaults are Quire's.

    Attributes:
        decodes_first: each decoding request is scheduled before any prefill. False: running requests share the budget
            in order of admission, so that concurrent prefills (under a ``long_prefill_token_threshold``) may delay a
            later decode.
        priority_preempts: under the priority policy, a waiting request preempts a running one of lower priority. False:
            it waits for free blocks; only running requests preempt others.
        least_loss: the victim of a preemption is the request with the fewest tokens to compute again. False: the last
            admitted one; under the priority policy the last to arrive of the lowest priority.
        admit_whole_prompts: a request is admitted once there are blocks for all its known tokens. False: blocks for
            its first chunk are enough.
        uncached_blocks_first: free blocks without cached content are allocated before all others ("engine-u"). False:
            free blocks are allocated in the order in which they were freed, a request's last block first ("engine").
        takes_between_steps: requests are received only when a step finishes or while no step runs, because the
            engine's loop waits for results; latencies count from then. Implemented by the simulator's clock, not by
            the Scheduler. False: requests are received as they arrive.
    """

    decodes_first: bool = True
    priority_preempts: bool = True
    least_loss: bool = True
    admit_whole_prompts: bool = True
    uncached_blocks_first: bool = True
    takes_between_steps: bool = False


QUIRE = Policies()
"""Quire's own policies."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Policies and settings of an engine to imitate.

    Attributes:
        settings: EngineConfig fields that differ from Quire's defaults; the user's settings override them.
        routing: how requests are routed to several engines.
    """

    policies: Policies
    settings: Mapping[str, bool | int | float] = field(default_factory=dict)
    routing: Routing = "cache"


_VLLM = Policies(
    decodes_first=False,
    priority_preempts=False,
    least_loss=False,
    uncached_blocks_first=False,
    takes_between_steps=True,
)
_VLLM_SETTINGS = {"max_prefill_share": 1.0, "watermark": 0.0, "reserve_full_sequence": False}

PRESETS: Mapping[str, Preset] = {
    "quire": Preset(QUIRE),
    # Prefills may use the whole budget; one queue in order of admission; blocks first in, first out; and, new in this
    # version, room for the whole prompt. A preempted request waits before all others: under fcfs its old position.
    "vllm-0.19": Preset(_VLLM, _VLLM_SETTINGS | {"async_scheduling": True}, "vllm"),
    # From 0.11: a request is admitted once its first chunk fits, and steps are not scheduled ahead.
    "vllm-0.11": Preset(
        replace(_VLLM, admit_whole_prompts=False),
        _VLLM_SETTINGS | {"async_scheduling": False},
        "vllm",
    ),
}
"""The values of ``like``."""


def find_preset(name: str) -> Preset:
    """Return the preset of ``name``, or for an unlisted ``engine-X.Y.Z`` the newest one that is not newer.

    Raises:
        ConfigError: unknown engine or older version; suggests the nearest name.
    """
    if name in PRESETS:
        return PRESETS[name]
    engine, _, version = name.partition("-")
    known = {_version(other): other for other in PRESETS if other.startswith(f"{engine}-")}
    not_newer = [each for each in sorted(known) if each <= _version(name)]
    if version and not_newer:
        return PRESETS[known[not_newer[-1]]]
    raise ConfigError(f"like={name}: unknown engine{did_you_mean(name, PRESETS)}; known: {', '.join(PRESETS)}")


def _version(name: str) -> tuple[int, ...]:
    """Return (1, 2) for ``engine-1.2.3``, or () without two numbers."""
    parts = name.partition("-")[2].split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else ()
