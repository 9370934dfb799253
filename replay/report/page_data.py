"""The JSON data of the HTML page, made from the runs' records only."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.replay.report import bins, figures
from quire.replay.report.bins import microseconds
from quire.replay.report.compare import RunComparison, compare
from quire.replay.run.request_states import STATES, run_end, state_intervals
from quire.replay.run.run_record import Moment, RequestRun, RunRecord

MAX_REQUESTS = 20_000
MAX_MOMENTS = 40_000
MAX_DELAYED = 200
MAX_TEXT = 200
"""Ids and details come from clients; longer ones are cut."""


def page_data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the page's data. Times are whole microseconds on each run's clock; ``left_out`` counts omitted items."""
    latencies = [figures.sorted_latencies(run) for run in runs]
    distributions = [
        bins.histogram("ttft", "Time to first token", _ones(latencies, "ttft")),
        bins.histogram("tpot", "Time per output token", _ones(latencies, "tpot")),
        bins.histogram("itl", "Inter-token latency", [run.itl for run in runs]),
        bins.histogram("e2e", "End-to-end latency", _ones(latencies, "e2e")),
        bins.histogram("queue", "Time in queue", _ones(latencies, "queue")),
    ]
    ends = [run_end(run.requests, list(run.steps.end[-1:])) for run in runs]
    return {
        "runs": [_run(run, latency, end, len(runs)) for run, latency, end in zip(runs, latencies, ends, strict=True)],
        "distributions": distributions,
        "comparison": _comparison(compare(*runs)) if len(runs) == 2 else None,
        "states": STATES,
        "begin": microseconds(min((_begin(run) for run in runs), default=0.0)),
        "end": microseconds(max(ends, default=0.0)),
    }


def _ones(latencies: Sequence[dict[str, list[float]]], name: str) -> list[list[tuple[float, int]]]:
    return [[(value, 1) for value in each[name]] for each in latencies]


def _begin(record: RunRecord) -> float:
    return min((run.arrival for run in record.requests), default=0.0)


def _run(record: RunRecord, latency: dict[str, list[float]], end: float, num_runs: int) -> dict[str, Any]:
    kept = record.requests[: MAX_REQUESTS // num_runs]
    words = _Words()
    moments, num_left_out = _kept_moments(kept, MAX_MOMENTS // num_runs)
    return {
        "title": record.title,
        "source": record.source,
        "cost": record.cost,
        "notes": list(record.notes),
        "settings": {key: str(value) for key, value in sorted(record.settings.items())},
        "equal": record.decisions_equal,
        "difference": None if record.first_difference is None else _difference_texts(record.first_difference),
        "facts": _facts(record),
        "latency": {name: figures.spread(values) for name, values in latency.items()}
        | {"itl": figures.weighted_spread(record.itl)},
        "steps": bins.bin_steps(record.steps, _preemption_times(record)),
        "hits": bins.hit_rates(record.requests, _begin(record), end),
        "reasons": _reasons(record),
        "requests": _requests(kept, moments, end, words),
        "words": words.known,
        "left_out": {"requests": len(record.requests) - len(kept), "moments": num_left_out},
    }


def _comparison(found: RunComparison) -> dict[str, Any]:
    """Return the comparison in milliseconds; ``seconds``: (what, first run, second run) over all requests."""
    return {
        "both": len(found.deltas),
        "slower": len(found.slower),
        "faster": found.num_faster,
        "only": [len(found.only_first), len(found.only_second)],
        "seconds": [(cut(part.what), *part.seconds) for part in found.parts],
        "delayed": [
            [cut(each.request_id), each.ttft, each.queue, each.e2e, cut(each.why)]
            for each in found.slower[:MAX_DELAYED]
        ],
    }


def _difference_texts(difference: dict[str, Any]) -> dict[str, str]:
    return {str(key): str(value)[:2000] for key, value in sorted(difference.items())}


def _facts(record: RunRecord) -> dict[str, Any]:
    cache = figures.prefix_cache(record)
    finishes = Counter(run.finish for run in record.requests)
    output = sum(run.num_output_tokens for run in record.requests)
    prompt = sum(run.num_prompt_tokens for run in record.requests if run.first_token >= 0)
    seconds = record.virtual_s or float("inf")
    return {
        "requests": len(record.requests),
        "rejected": finishes["rejected"],
        "aborted": finishes["abort"],
        "failed": finishes["error"],
        "unfinished": finishes[""],
        "preemptions": sum(run.num_preemptions for run in record.requests),
        "preempted": sum(run.num_preemptions > 0 for run in record.requests),
        "hit_rate": cache.hit_rate,
        "hit_tokens": cache.hit_tokens,
        "hit_requests": cache.requests_with_hit,
        "input_tokens": cache.input_tokens,
        "output_tokens": output,
        "output_per_s": output / seconds,
        "total_per_s": (output + prompt) / seconds,
        "steps": len(record.steps),
        "pool": record.num_usable_blocks,
        "block_size": record.block_size,
        "budget": record.max_num_batched_tokens,
        "evicted": record.num_evicted_blocks,
        "tiers": [
            [name, tier.get("hit_tokens"), tier["num_pages"], tier["num_loaded"], tier["num_stored"]]
            for name, tier in record.tiers.items()
        ],
        "virtual_s": record.virtual_s,
    }


def _preemption_times(record: RunRecord) -> list[float]:
    return [moment.time for run in record.requests for moment in run.moments if moment.what == "preempt"]


def _reasons(record: RunRecord) -> list[tuple[str, int, int]]:
    """Return (reason, preemptions, preempted requests), the most frequent first."""
    counts: Counter[str] = Counter()
    met: dict[str, set[int]] = {}
    for number, run in enumerate(record.requests):
        for moment in run.moments:
            if moment.what == "preempt":
                counts[moment.reason] += 1
                met.setdefault(moment.reason, set()).add(number)
    return sorted(((why, count, len(met[why])) for why, count in counts.items()), key=lambda row: (-row[1], row[0]))


class _Words:
    """Numbers repeated strings, so that the page contains each once."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """Return the number of a word; -1 for the empty one."""
        if not word:
            return -1
        word = cut(word)
        if word not in self._numbers:
            self._numbers[word] = len(self.known)
            self.known.append(word)
        return self._numbers[word]


def cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _kept_moments(requests: Sequence[RequestRun], most: int) -> tuple[list[list[Moment]], int]:
    """Return the moments of each request, at most ``most`` in all, and how many are omitted: wait reasons first."""
    total = sum(len(run.moments) for run in requests)
    if total <= most:
        return [run.moments for run in requests], 0
    room = most - sum(moment.what != "wait" for run in requests for moment in run.moments)
    kept, num_kept = [], 0
    for run in requests:
        chosen = []
        for moment in run.moments:
            waits = moment.what == "wait"
            if num_kept < most and (not waits or room > 0):
                chosen.append(moment)
                num_kept += 1
                room -= waits
        kept.append(chosen)
    return kept, total - num_kept


def _requests(
    requests: Sequence[RequestRun], moments: Sequence[Sequence[Moment]], end: float, words: _Words
) -> dict[str, list[Any]]:
    """Return the requests as columns. Times other than ``arrival`` are relative to it; -1: none.

    ``state_intervals``: state, microseconds, state, ... without gaps. ``moments``: time, what, reason, other, ...,
    where other is a request's index, -1 for none, or -2 minus the number of a word.
    """
    numbers = {run.request_id: number for number, run in enumerate(requests)}

    def other(request_id: str) -> int:
        if not request_id:
            return -1
        return numbers[request_id] if request_id in numbers else -2 - words.number(request_id)

    def since(run: RequestRun, time: float) -> int:
        return microseconds(time) - microseconds(run.arrival) if time >= 0 else -1

    def flatten(run: RequestRun, kept: Sequence[Moment]) -> list[int]:
        flat: list[int] = []
        for moment in kept:
            flat += since(run, moment.time), words.number(moment.what), words.number(moment.reason), other(moment.other)
        return flat

    return {
        "id": [cut(run.request_id) for run in requests],
        "conversation": [words.number(run.conversation) for run in requests],
        "priority": [run.priority for run in requests],
        "prompt": [run.num_prompt_tokens for run in requests],
        "output": [run.num_output_tokens for run in requests],
        "cached": [run.num_cached_tokens for run in requests],
        "preemptions": [run.num_preemptions for run in requests],
        "finish": [words.number(run.finish) for run in requests],
        "detail": [words.number(run.finish_detail) for run in requests],
        "arrival": [microseconds(run.arrival) for run in requests],
        "scheduled": [since(run, run.scheduled) for run in requests],
        "first": [since(run, run.first_token) for run in requests],
        "end": [since(run, run.end) for run in requests],
        "state_intervals": [_flat_intervals(run, end) for run in requests],
        "moments": [flatten(run, kept) for run, kept in zip(requests, moments, strict=True)],
    }


def _flat_intervals(run: RequestRun, end: float) -> list[int]:
    flat: list[int] = []
    for each in state_intervals(run, end):
        flat += STATES.index(each.state), microseconds(each.end) - microseconds(each.begin)
    return flat
