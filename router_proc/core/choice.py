"""Which engine gets a request: the rules of the policies, with their constants. A pure function of what is known."""

from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from quire.protocol.routing import RoutingPolicy
from quire.router_proc.core.load import EngineLoad

WEIGHT = 4.0
"""How much an uncached token of the request counts, beside one of the queue: where it is computed, it also evicts.

In replays of public traces with four engines (docs/log/2026-11-28.md), 4 finds 92 to 100 % of what one engine with
four times the pool finds, and 2 finds 88 to 99 %. The mean end-to-end latency with 4 is 1 % shorter to 2 % longer.
"""
RUNNING_TOKENS = 16.0
"""Tokens of a prompt that a running request counts as, because it slows the others down."""
HOST_SHARE = 0.1
DISK_SHARE = 0.3
"""What a token that is loaded from another medium costs, as a share of computing it."""
ADAPTER_TOKENS = 128
"""Tokens of a prompt that loading an adapter counts as. It is loaded once, and then shares the requests of the others:
a second engine gets it when the first one has about eight requests more."""

MIN_PACE, MAX_PACE = 1.25, 7.0
"""Between these a token's time on a device counts, as a multiple of the fastest device's. Hiccups and mixtures of work
alone make a tenth, which must not decide between engines without requests. An A100 has 2.6 times the arithmetic and 6.8
times the memory bandwidth of an L4, the usual unlike pair."""


class RoutingQuestion(NamedTuple):
    """What the rules know about a request.

    Attributes:
        num_tokens: tokens to compute unless they are cached.
        adapter: digest of its adapter, or empty.
        last_engine: the engine that had its job's last request, or -1.
    """

    num_tokens: int
    adapter: bytes
    last_engine: int


class Option(NamedTuple):
    """An engine that accepts the request.

    Attributes:
        num_cached: tokens of the request that it has.
        num_host, num_disk: those of them that are only on that medium.
    """

    engine: int
    load: EngineLoad
    num_cached: int = 0
    num_host: int = 0
    num_disk: int = 0


class EngineChoice(NamedTuple):
    option: Option
    reason: str


def choose(policy: RoutingPolicy, question: RoutingQuestion, options: list[Option]) -> EngineChoice:
    """Return the engine for a request, and the reason as of Routed. ``options``: at least one, by engine."""
    if len(options) == 1:
        return EngineChoice(options[0], "only")
    if policy == "round-robin":
        return EngineChoice(min(options, key=lambda option: (option.load.last_chosen, option.engine)), "turn")
    if policy == "session":
        for option in options:
            if option.engine == question.last_engine:
                return EngineChoice(option, "session")
    return _cheapest(question, options)


def _cheapest(question: RoutingQuestion, options: list[Option]) -> EngineChoice:
    """Return the option with the least score.

    Ties: the engine that had the job's last request, then the fewest requests, then the longest time since a choice.
    """
    # Every engine is scored, since there are at most some dozens: sampling two of them, which scales further, would
    # miss the one that has the prefix.
    scores = [_score(question, option) for option in options]
    least = min(scores)
    tied = [option for option, score in zip(options, scores, strict=True) if score == least]
    best = tied[0] if len(tied) == 1 else min(tied, key=lambda option: _tie_order(question, option))
    return EngineChoice(best, _reason(question, best, options, was_tied=len(tied) > 1))


def _tie_order(question: RoutingQuestion, option: Option) -> tuple[bool, int, int]:
    return option.engine != question.last_engine, option.load.num_requests, option.load.last_chosen


def _score(question: RoutingQuestion, option: Option) -> float:
    """Return the cost of an option, in tokens of the fastest device: until the request decodes, and what it evicts."""
    load = option.load
    tokens = float(question.num_tokens - option.num_cached)
    if option.num_host or option.num_disk:
        tokens += HOST_SHARE * option.num_host + DISK_SHARE * option.num_disk
    queue = load.queue_tokens + RUNNING_TOKENS * load.num_running
    if question.adapter and not load.has_adapter(question.adapter):
        # Added to the queue and not to the tokens: loading delays this request, but evicts no block.
        queue += ADAPTER_TOKENS
    return (WEIGHT - 1.0) * tokens + (tokens + queue) * load.pace  # what is evicted costs the same on any device


def _reason(question: RoutingQuestion, best: Option, options: Iterable[Option], *, was_tied: bool) -> str:
    others = [option for option in options if option is not best]
    if best.num_cached > max([option.num_cached for option in others]):
        return "cached"
    adapter = question.adapter
    if adapter and best.load.has_adapter(adapter) and not all(option.load.has_adapter(adapter) for option in others):
        return "adapter"
    return "session" if was_tied and best.engine == question.last_engine else "load"


def set_paces(devices: list[tuple[str, EngineLoad]]) -> None:
    """Give each engine the pace of its device, relative to the fastest: the mean of all engines on such a device, so
    that equal ones get equal work after any measurement."""
    # A mean by device. With the measured pace of its own, an engine that had once been slow got fewer requests than its
    # equals, or none, and so nothing corrected the measurement (docs/log/2026-11-28.md).
    means = {name: fmean(load.measured for other, load in devices if other == name) for name, _ in devices}
    fastest = min(means.values(), default=1.0)
    for name, load in devices:
        pace = min(means[name] / fastest, MAX_PACE)
        load.pace = pace if pace >= MIN_PACE else 1.0
