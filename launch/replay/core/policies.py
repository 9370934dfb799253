"""Where other engines decide otherwise than this one: so that their runs can be replayed as they were.

The live engine has none of them. A replay may be given others than ``Policies()`` (``--set like=vllm-0.19``, or one key
at a time), for what it is compared with was decided by them; planner.py and fifo_pool.py follow them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire.protocol.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Policies:
    """Each is a key of ``--set`` in a replay. The defaults are the live engine's.

    Attributes:
        decodes_first: decoding requests get their token of a step before any prefill gets on. False: running requests
            share the budget in order of admission, whatever they do, so that prefills which run side by side (under a
            ``long_prefill_token_threshold``) may keep a later decode waiting.
        priority_preempts: under the priority policy a waiting request preempts a running one of a worse number. False:
            it waits for room; only running requests preempt others.
        admit_whole_prompts: no request is admitted before there are blocks for all its known tokens. False: blocks for
            its first chunk are enough.
        uncached_blocks_first: a freed block without a content to be found is reused before all others ("engine-u").
            False: freed blocks are reused in the order in which they were freed, a request's last one first
            ("engine").
        takes_between_steps: requests are taken in only when a result has come, or while nothing runs, for the engine's
            loop waits for results; and what is measured of them counts from then. The Scheduler knows nothing of it:
            a simulator's clock does. False: they are taken in as they come.
    """

    decodes_first: bool = True
    priority_preempts: bool = True
    admit_whole_prompts: bool = True
    uncached_blocks_first: bool = True
    takes_between_steps: bool = False


QUIRE = Policies()
"""The live engine's."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An engine to behave like.

    Attributes:
        settings: fields of EngineConfig that differ from this engine's defaults; what the user sets wins.
    """

    policies: Policies
    settings: Mapping[str, bool | int | float] = field(default_factory=dict)


_VLLM = Policies(decodes_first=False, priority_preempts=False, uncached_blocks_first=False, takes_between_steps=True)
_VLLM_SETTINGS = {"max_prefill_share": 1.0, "watermark": 0.0, "reserve_full_sequence": False}

PRESETS: Mapping[str, Preset] = {
    "quire": Preset(QUIRE),
    # Whole steps for prefill, one queue in order of admission, first-in first-out blocks, and (new in this version)
    # room for the whole prompt. A preempted request waits in front of all others, which under fcfs is its old place.
    "vllm-0.19": Preset(_VLLM, _VLLM_SETTINGS | {"async_scheduling": True}),
    # As far back as 0.11: chunks were admitted as soon as they fitted, and steps were not decided ahead.
    "vllm-0.11": Preset(
        replace(_VLLM, admit_whole_prompts=False),
        _VLLM_SETTINGS | {"async_scheduling": False},
    ),
}
"""By name, as ``like`` has it."""


def find_preset(name: str) -> Preset:
    """The engine of that name; of ``vllm-X.Y.Z``, or one between two that are known, the latest that is not newer.

    Raises:
        ConfigError: there is none; says the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    engine, _, version = name.partition("-")
    known = {_version(other): other for other in PRESETS if other.startswith(f"{engine}-")}
    not_newer = [each for each in sorted(known) if each <= _version(name)]
    if version and not_newer:
        return PRESETS[known[not_newer[-1]]]
    raise ConfigError(f"like={name}: no such engine{did_you_mean(name, PRESETS)}; known: {', '.join(PRESETS)}")


def _version(name: str) -> tuple[int, ...]:
    """Of ``engine-1.2.3``: (1, 2); empty where there are no two numbers."""
    parts = name.partition("-")[2].split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(part.isdecimal() for part in parts) else ()
