"""Sends a running server one mutated request after another and checks each answer and the canary."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx
from abuse import SLOWEST_S, AbusedServer, check_error
from http_mutations import RIGHT, Case, make_case

# An answer of a few tokens, on a machine that also does other work.
SLOWEST_ANSWER_S = 30.0


@dataclass
class Counts:
    """A request and its answer."""

    requests: int = 0
    bytes_sent: int = 0
    by_status: Counter[int] = field(default_factory=Counter)
    by_mutation: Counter[str] = field(default_factory=Counter)
    slowest_refusal_s: float = 0.0

    def add(self, other: "Counts") -> None:
        self.requests += other.requests
        self.bytes_sent += other.bytes_sent
        self.by_status += other.by_status
        self.by_mutation += other.by_mutation
        self.slowest_refusal_s = max(self.slowest_refusal_s, other.slowest_refusal_s)

    def as_dict(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "bytes_sent": self.bytes_sent,
            "by_status": {str(status): count for status, count in sorted(self.by_status.items())},
            "by_mutation": dict(sorted(self.by_mutation.items())),
            "slowest_refusal_s": round(self.slowest_refusal_s, 3),
        }


class BadAnswer(AssertionError):
    """The server did something that it must not do; names the case's seed, from which ``make_case`` makes it again."""


def check_base_requests(server: AbusedServer) -> None:
    """Check that every request is answered before it is mutated: otherwise its mutations would test nothing else."""
    for path, body in RIGHT:
        response = server.post(path, body)
        assert response.status_code == 200, response.text
        check_answer(response)


def fuzz(server: AbusedServer, seeds: Iterable[str]) -> Counts:
    """Run one case per seed.

    Raises:
        BadAnswer: an answer, or the canary after it, was wrong.
    """
    counts = Counts()
    for seed in seeds:
        case = make_case(seed)
        try:
            with server.watch() as watch:
                response = server.client.post(case.path, content=case.content, timeout=SLOWEST_ANSWER_S)
            check_answer(response, watch.own_seconds)
            server.check()
        except (AssertionError, ValueError, httpx.HTTPError) as error:
            raise BadAnswer(f"seed {seed!r}: {case.path} {case.how} {case.content[:3000]!r}: {error}") from error
        _count(counts, case, response, watch.own_seconds)
    return counts


def check_answer(response: httpx.Response, own_seconds: float = 0.0) -> None:
    """Raise AssertionError or ValueError unless it is a complete answer or a client error.

    ``own_seconds``: the server's own time for it, as a Watch counts it.
    """
    status = response.status_code
    if status != 200:
        assert 400 <= status < 500 or status == 503, f"status {status}: {response.text[:300]}"
        assert own_seconds < SLOWEST_S, f"refused after {own_seconds:.1f} s of its own"
        check_error(response)
    elif response.headers["content-type"].startswith("text/event-stream"):
        blocks = response.content.decode("utf-8", "strict").split("\n\n")
        assert blocks[-1] == "" and all(block.startswith("data: ") for block in blocks[:-1]), blocks[-2:]
        last = blocks[-2].removeprefix("data: ")
        assert last == "[DONE]" or "error" in json.loads(last), last
        for block in blocks[:-2]:
            json.loads(block.removeprefix("data: "))
    else:
        json.loads(response.content.decode("utf-8", "strict"))


def _count(counts: Counts, case: Case, response: httpx.Response, own_seconds: float) -> None:
    counts.requests += 1
    counts.bytes_sent += len(case.content)
    counts.by_status[response.status_code] += 1
    counts.by_mutation.update(case.how)
    if response.status_code != 200:
        counts.slowest_refusal_s = max(counts.slowest_refusal_s, own_seconds)
