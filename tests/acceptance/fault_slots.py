"""So many streams at once: when each had its last piece, and whether every answer was right."""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise

from live_streams import Answer, Ask, stream

MAX_EXAMPLES = 5
"""Of each kind of failure that are kept in words."""


class Verdicts:
    """What became of the answers so far.

    Attributes:
        num_lost: cut off together with the front end that gave them.
        num_failed: not whole, though their front end lived.
        num_changed: whole, and wrong.
        num_diverged: right in themselves, and not the reference: another batch rounds otherwise. Only counted where
            answers need not be exact.
    """

    def __init__(self, references: Sequence[Answer], *, exact: bool) -> None:
        self._references = references
        self._exact = exact
        self.num_whole = self.num_lost = self.num_failed = self.num_changed = self.num_diverged = 0
        self.num_tokens = 0
        self.examples: list[str] = []

    def judge(self, number: int, answer: Answer, *, doomed: bool) -> None:
        """``number``: of the request. ``doomed``: its front end was killed, so that it may end as it likes."""
        reference = self._references[number]
        if answer.error:
            self.num_lost += doomed
            if not doomed:
                self.num_failed += 1
                self._example(f"request {number} failed: {answer.error}")
            return
        self.num_whole += 1
        self.num_tokens += answer.num_tokens
        wrong = answer.contradiction()
        same = answer.same_as(reference)
        if self._exact and not same:
            wrong = wrong or _difference(answer, reference)
        if wrong:
            self.num_changed += 1
            self._example(f"request {number} changed: {wrong}")
        elif not same:
            self.num_diverged += 1

    def _example(self, text: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)


class Slots:
    """Each slot has one answer at a time, of a request that it draws; a new one as soon as that has ended.

    Attributes:
        arrivals: (monotonic seconds, slot) of every piece since it was last cleared.
    """

    def __init__(self, port: int, asks: Sequence[Ask], count: int, seed: int, verdicts: Verdicts | None) -> None:
        """``verdicts``: None: no answer is judged."""
        self.arrivals: list[tuple[float, int]] = []
        self._last = [0.0] * count
        self._port = port
        self._asks = asks
        self._seed = seed
        self._verdicts = verdicts
        self._doomed: set[int] = set()
        self._open = True
        self._tasks = [asyncio.create_task(self._run(slot)) for slot in range(count)]

    def doom(self, ports: set[int]) -> None:
        """The connections of these clients' ports are about to be cut."""
        self._doomed |= ports

    async def flow(self, since: float, seconds: float) -> bool:
        """Wait until every slot has had a piece after ``since``; False when one has had none for so long."""
        deadline = time.monotonic() + seconds
        while min(self._last) <= since:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    def firsts(self, since: float) -> list[float]:
        """When each slot that has had a piece since then had its first one; in order."""
        firsts: dict[int, float] = {}
        for at, slot in self.arrivals:
            if at >= since:
                firsts.setdefault(slot, at)
        return list(firsts.values())

    def end_of_silence(self, since: float) -> float:
        """The end of the longest time in which no piece came, after ``since``."""
        times = [since, *(at for at, _ in self.arrivals if at >= since)]
        return max(pairwise(times), key=lambda gap: gap[1] - gap[0], default=(since, since))[1]

    async def finish(self, seconds: float) -> int:
        """Let the running answers end; how many did not."""
        self._open = False
        _, pending = await asyncio.wait(self._tasks, timeout=seconds)
        self.cancel()
        return len(pending)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, slot: int) -> None:
        draw = random.Random(f"{self._seed} {slot}")

        def on_piece(answer: Answer) -> None:
            if answer.port in self._doomed:
                return  # what lies in a socket whose other end is gone says nothing
            now = time.monotonic()
            self._last[slot] = now
            self.arrivals.append((now, slot))

        while self._open:
            number = draw.randrange(len(self._asks))
            answer = await stream(self._port, self._asks[number], on_piece)
            if self._verdicts is not None:
                self._verdicts.judge(number, answer, doomed=answer.port in self._doomed)
            if answer.error:
                await asyncio.sleep(0.05)  # there may be no front end for a while


def _difference(answer: Answer, reference: Answer) -> str:
    """Where an answer left its reference."""
    for index, told in sorted(reference.choices.items()):
        mine = answer.choices.get(index)
        if mine is None:
            return f"choice {index} is missing"
        if mine.text != told.text:
            pairs = enumerate(zip(mine.text, told.text, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(mine.text), len(told.text)))
            return f"choice {index} at character {at}: {mine.text[at : at + 20]!r} for {told.text[at : at + 20]!r}"
        if mine != told:
            return f"choice {index}: the text is the same, its logprobs or its ending ({mine.finish_reason}) are not"
    return f"{answer.num_tokens} tokens are counted for {reference.num_tokens}"
