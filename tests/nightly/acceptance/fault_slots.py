"""Many concurrent streams: the time of each one's last data, and whether every answer was right."""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise

from live_streams import Answer, StreamRequest, stream

MAX_EXAMPLES = 5
"""Failures that are kept as text."""


class AnswerCounts:
    """Results of the answers so far.

    Attributes:
        num_lost: cut off together with their front end.
        num_failed: incomplete, although their front end was alive.
        num_changed: complete, but wrong.
        num_diverged: consistent, but different from the reference, because another batch rounds differently. Only
            counted if answers need not be exact.
    """

    def __init__(self, references: Sequence[Answer], *, exact: bool) -> None:
        self._references = references
        self._exact = exact
        self.num_whole = self.num_lost = self.num_failed = self.num_changed = self.num_diverged = 0
        self.num_tokens = 0
        self.examples: list[str] = []

    def check(self, number: int, answer: Answer, *, cut_off: bool) -> None:
        """Check the answer of request ``number``. ``cut_off``: its front end was killed, so any ending is allowed."""
        reference = self._references[number]
        if answer.error:
            self.num_lost += cut_off
            if not cut_off:
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
    """Each slot has one request at a time, drawn at random; the next begins as soon as the last ended.

    Attributes:
        arrivals: (monotonic seconds, slot) of all data since this list was last cleared.
        begins: the same of the requests that were sent.
    """

    def __init__(
        self, port: int, requests: Sequence[StreamRequest], count: int, seed: int, counts: AnswerCounts | None
    ) -> None:
        """``counts``: None if answers are not checked."""
        self.arrivals: list[tuple[float, int]] = []
        self.begins: list[tuple[float, int]] = []
        self._last = [0.0] * count
        self._port = port
        self._requests = requests
        self._seed = seed
        self._counts = counts
        self._cut_ports: set[int] = set()
        self._open = True
        self._tasks = [asyncio.create_task(self._run(slot)) for slot in range(count)]

    def expect_cut(self, ports: set[int]) -> None:
        """The connections from these client ports are about to be cut."""
        self._cut_ports |= ports

    async def wait_for_data(self, since: float, seconds: float) -> bool:
        """Wait until every slot has received data after ``since``; return False after ``seconds``."""
        deadline = time.monotonic() + seconds
        while min(self._last) <= since:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    def first_arrivals(self, since: float) -> list[float]:
        """Return the time of each slot's first data after ``since``, in order."""
        first_arrivals: dict[int, float] = {}
        for at, slot in self.arrivals:
            if at >= since:
                first_arrivals.setdefault(slot, at)
        return list(first_arrivals.values())

    def last_arrivals(self) -> list[float]:
        """Return the time of each slot's last data."""
        return list(self._last)

    def longest_silences(self, before: Sequence[float]) -> list[float]:
        """Return the longest time between two data of one answer in each slot.

        The time to the first data of a later request does not count.

        Args:
            before: the last data of each slot before ``arrivals`` and ``begins`` were cleared.
        """
        previous: list[float | None] = list(before)
        longest = [0.0] * len(before)
        events = [*((at, slot, True) for at, slot in self.arrivals), *((at, slot, False) for at, slot in self.begins)]
        for at, slot, is_data in sorted(events):
            since = previous[slot]
            if is_data and since is not None:
                longest[slot] = max(longest[slot], at - since)
            previous[slot] = at if is_data else None
        return longest

    def end_of_silence(self, since: float) -> float:
        """Return the end of the longest time without data after ``since``."""
        times = [since, *(at for at, _ in self.arrivals if at >= since)]
        return max(pairwise(times), key=lambda gap: gap[1] - gap[0], default=(since, since))[1]

    async def finish(self, seconds: float) -> int:
        """Let the running answers end; return the number that did not."""
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
            if answer.port in self._cut_ports:
                return  # data buffered before the front end died does not indicate recovery
            now = time.monotonic()
            self._last[slot] = now
            self.arrivals.append((now, slot))

        while self._open:
            number = draw.randrange(len(self._requests))
            self.begins.append((time.monotonic(), slot))
            answer = await stream(self._port, self._requests[number], on_piece)
            if self._counts is not None:
                self._counts.check(number, answer, cut_off=answer.port in self._cut_ports)
            if answer.error:
                await asyncio.sleep(0.05)  # there may be no front end for a while


def _difference(answer: Answer, reference: Answer) -> str:
    """Return where an answer differs from its reference."""
    for index, right in sorted(reference.choices.items()):
        found = answer.choices.get(index)
        if found is None:
            return f"choice {index} is missing"
        if found.text != right.text:
            pairs = enumerate(zip(found.text, right.text, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(found.text), len(right.text)))
            return (
                f"choice {index} at character {at}: got {found.text[at : at + 20]!r}, "
                f"expected {right.text[at : at + 20]!r}"
            )
        if found != right:
            return f"choice {index}: same text, different logprobs or finish_reason ({found.finish_reason})"
    return f"usage has {answer.num_tokens} tokens, expected {reference.num_tokens}"
