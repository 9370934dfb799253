"""Random runs in which most contents move: many long prefixes, a small pool, and every fault that a copy may have."""

import random
from collections import Counter

from byte_pages import BytePages
from scheduler_driver import Driver, expected_tokens

from quire.protocol.wire.transfer_messages import BlocksMoved
from quire.scheduler_proc.requests.events import LoadLate

LONG = [80, 140], [30, 200, 600], 12, (40, 200), 600
SHORT = [10, 16, 24], [3, 8, 30], 2, (12, 30), 30
"""Blocks and pages to choose from, the number of prefixes and their tokens, and the number of events."""

EVENTS = {
    "request": 250,
    "abort": 10,
    "worker killed": 3,
    "epoch": 2,
    "tier killed": 1,
    "late": 10,
    "lost answer": 1,
    "doubled answer": 5,
    "reordered": 50,
    "disk opened": 5,
    "step": 700,
}
"""What may happen next, with its relative frequency."""


class TierLoad:
    """One engine whose pages are bytes in memory, and its requests.

    Attributes:
        counts: ``moves``, the blocks that were copied, and the number of each event and fault.
    """

    def __init__(self, seed: int, *, short: bool = False, check_every: int = 1) -> None:
        """
        Args:
            short: a run of a few events in a pool so small that requests often cannot continue.
            check_every: number of steps and answers from one check of the invariants to the next.
        """
        self.rng = rng = random.Random(seed)
        blocks, pages, num_prefixes, prefix, self._num_events = SHORT if short else LONG
        self.engine = engine = Driver(
            rng.choice(blocks),
            num_host_pages=rng.choice([*pages, 0]),
            num_disk_pages=rng.choice([*pages, 0]),
            async_scheduling=rng.random() < 0.5,
            max_model_len=4 * min(blocks[0] - 1, 64),
            max_num_batched_tokens=rng.choice([16, 64, 256]),
            watermark=rng.choice([0.0, 0.1]),
            scheduling_policy=rng.choice(["fcfs", "priority"]),
        )
        self.pages = engine.worker.host = BytePages(engine.worker.host, rng, rng.choice([0.0, 0.02, 0.2]))
        per_page, per_token = rng.choice([1e-5, 1e-3, 4e-3, 0.1]), 1e-3
        self.pages.seconds = lambda num_pages: num_pages * per_page
        engine.worker.step_seconds = lambda num_tokens, num_drafts: num_tokens * per_token
        self.counts: Counter[str] = Counter()
        self._prefixes = [[rng.randrange(1, 900) for _ in range(rng.randrange(*prefix))] for _ in range(num_prefixes)]
        self._prompts: dict[str, list[int]] = {}
        self._answers: list[BlocksMoved] = []
        check, number = engine.scheduler.check, iter(range(10**9))
        engine.scheduler.check = lambda: next(number) % check_every or check()  # type: ignore[method-assign]

    def run(self) -> Counter[str]:
        """Run random events, then check that every request ends with the right answer and that nothing is left."""
        engine = self.engine
        for event in self.rng.choices(list(EVENTS), list(EVENTS.values()), k=self._num_events):
            self.counts[event] += self._happens(event)
        self.pages.rate = 0.0
        if self.counts["lost answer"]:
            engine.restart_worker()
        self._drain()
        engine.check_drained()
        for request_id, prompt in self._prompts.items():
            tokens = engine.answers[request_id].tokens
            assert tokens == expected_tokens(prompt, len(tokens)), f"wrong answer of {request_id}"
        choices = engine.scheduler.statistics().load_choices
        return self.counts + self.pages.counts + Counter({f"chose {kind}": count for kind, count in choices.items()})

    def _drain(self) -> None:
        """Let every request end; in five rounds of steps, stores and loads some request must be computed."""
        engine, before = self.engine, -1
        for _ in range(2000):
            if engine.scheduler.is_idle:
                break
            ended = sum(answer.ended is not None for answer in engine.answers.values())
            advanced = len(engine.diffs) + ended
            assert advanced > before, f"no request advances: {list(engine.scheduler.table.requests.values())}"
            before = advanced
            engine.step(5)
        engine.settle()

    def _happens(self, event: str) -> bool:
        """Let one thing happen if it can, and return whether it did."""
        engine, rng, pending = self.engine, self.rng, self.pages.pending
        live = [request.request_id for request in engine.scheduler.table.requests.values()]
        match event:
            case "request" if len(live) < 6:
                request_id, prompt = str(len(self._prompts)), [*rng.choice(self._prefixes), rng.randrange(1, 900)]
                self._prompts[request_id] = prompt
                engine.add(request_id, prompt, max_tokens=rng.randrange(1, 6), priority=rng.randrange(2))
            case "abort" if live:
                engine.abort(rng.choice(live))
            case "worker killed":
                engine.restart_worker()
            case "epoch":
                engine.begin_worker_epoch()
            case "tier killed":
                self.pages.wipe()
            case "late" if pending:
                engine.consume(LoadLate(rng.choice(pending).transfer))
            case "lost answer" if pending:
                del pending[rng.randrange(len(pending))]
            case "doubled answer" if self._answers:
                engine.consume(rng.choice(self._answers))
            case "reordered" if len(pending) > 1:
                engine.move(rng.randrange(1, len(pending)))
            case "disk opened" if (disk := engine.scheduler.kv.disk) is not None and not disk.is_open:
                engine.read_disk()
            case "step":
                engine.fill()
                engine.execute()
                if rng.random() < 0.7:
                    engine.move()
                if isinstance(delivered := engine.deliver(), BlocksMoved):
                    self._answers = [*self._answers[-9:], delivered]
            case _:
                return False
        return True
