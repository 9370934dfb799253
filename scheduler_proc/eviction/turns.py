"""Classes of requests, and how often and how soon their contents are used again, learned per class."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

NOT_ENDED = 0
"""Class of what is freed before its request ends: a preempted request, or blocks that a window has left behind."""
REPEATED = 1
"""Class of prompts that an earlier request had too: the next request shares them, but does not continue them."""
CUT = 2
"""Class of requests that were aborted or have failed."""
LAST = 3
"""Class of the last turns of their programs."""
_FIRST = 4
LENGTHS = (1024, 4096, 12288, 49152)
"""Prompt tokens up to which each class of lengths reaches; the last one has no bound."""
MAX_DEPTH = 4
"""Turns of a conversation from this one on are in one class."""
MUCH_NEW = 2048
"""Tokens by which a prompt must exceed that of the turn before, at least, to be in the class of much new input."""
SHORT_OUTPUT = 32
"""Most tokens of a short answer."""
_STAGES = 2 * MAX_DEPTH - 1
"""A first turn, and later ones with little or with much new input."""
NUM_CLASSES = _FIRST + 4 * _STAGES * (len(LENGTHS) + 1)

WAIT_S = 600.0
"""Seconds after its end after which a turn counts as not continued, at least."""
MAX_WAIT_S = 7200.0
WAIT_GAPS = 4.0
"""The same in mean times until a turn is continued, up to MAX_WAIT_S: conversations may be slower."""
MAX_OPEN = 8192
"""Ended turns that are remembered. Beyond, the oldest count as not continued."""
SHRINKAGE = 3.0
"""Turns with the mean of all classes that each class has in addition to its own, for p."""
RATE_SHRINKAGE = 100.0
"""The same for λ, which differs less."""
MEAN_GAP_S = 120.0
"""Time until a turn is continued, as long as none has been."""


class Turn(NamedTuple):
    """A turn of a conversation.

    Attributes:
        number: its number in the conversation, from 1.
        num_new_tokens: prompt tokens that the turn before did not have.
        follows_tool: whether the answer before it called a tool.
    """

    number: int
    num_prompt_tokens: int
    num_new_tokens: int
    num_output_tokens: int
    follows_tool: bool = False

    @property
    def turn_class(self) -> int:
        length = sum(self.num_prompt_tokens > most for most in LENGTHS)
        stage = 2 * (min(self.number, MAX_DEPTH) - 1)
        stage -= self.number > 1 and self.num_new_tokens <= MUCH_NEW
        group = 2 * self.follows_tool + (self.num_output_tokens <= SHORT_OUTPUT)
        return _FIRST + (group * _STAGES + stage) * (len(LENGTHS) + 1) + length


@dataclass(slots=True)
class _Ended:
    """An ended turn, until it is continued or WAIT_S have passed.

    Attributes:
        number: of the turn in its conversation.
        is_shared: another turn had the same prompt, so that a longer prompt does not continue this one.
        is_continued: its content has been used since.
    """

    turn_class: int
    at: float
    number: int
    num_prompt_tokens: int
    is_shared: bool
    is_continued: bool = False


class Turns:
    """Learns, per class, the probability p that a turn is continued, and the rate λ per second at which it then is.

    A turn is found by the hash of the last full block of its prompt: a request whose prompt contains it continues the
    turn. Memory is bounded by MAX_OPEN; it does not depend on what is cached.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, _Ended] = OrderedDict()
        self._num = [0.0] * NUM_CLASSES
        self._continued = [0.0] * NUM_CLASSES
        self._gaps = [0.0] * NUM_CLASSES
        self._p = [0.5] * NUM_CLASSES
        self._rate = [1.0 / MEAN_GAP_S] * NUM_CLASSES

    def arrived(self, hashes: Sequence[bytes], now: float) -> tuple[int, int]:
        """Note which turns a new request continues. O(hashes).

        Returns:
            Its number in the conversation, from 1, and the prompt tokens of the turn before.
        """
        before, ended = (0, 0), self._open
        for key in filter(ended.__contains__, hashes):
            turn = ended[key]
            if not turn.is_shared:
                before = max(before, (turn.number, turn.num_prompt_tokens))
            if not turn.is_continued:
                turn.is_continued = True
                self._num[turn.turn_class] += 1
                self._continued[turn.turn_class] += 1
                self._gaps[turn.turn_class] += max(now - turn.at, 1.0)
        return before[0] + 1, before[1]

    def ended(self, key: bytes, turn: Turn, turn_class: int, now: float) -> int:
        """Remember a turn by the hash of its prompt's last full block. Returns its class."""
        is_shared = self._open.pop(key, None) is not None
        found = REPEATED if is_shared else turn_class
        self._open[key] = _Ended(found, now, turn.number, turn.num_prompt_tokens, is_shared)
        return found

    def learn(self, now: float) -> None:
        """Forget turns that ended too long ago, and compute what ``hazard`` returns."""
        ended, mean_gap = self._open, sum(self._gaps) / max(sum(self._continued), 1.0)
        wait = min(max(WAIT_S, WAIT_GAPS * mean_gap), MAX_WAIT_S)
        while ended:
            oldest = next(iter(ended.values()))
            if now - oldest.at < wait and len(ended) <= MAX_OPEN:
                break
            ended.popitem(last=False)
            self._num[oldest.turn_class] += not oldest.is_continued
        num_continued = sum(self._continued)
        p = SHRINKAGE * (num_continued + 1.0) / (sum(self._num) + 2.0)
        gap = RATE_SHRINKAGE * (sum(self._gaps) + MEAN_GAP_S) / (num_continued + 1.0)
        # Below 1: at 1 the hazard would not fall with the age.
        counts = zip(self._continued, self._num, strict=True)
        self._p = [min((continued + p) / (num + SHRINKAGE), 0.999) for continued, num in counts]
        times = zip(self._continued, self._gaps, strict=True)
        self._rate = [(continued + RATE_SHRINKAGE) / (gaps + gap) for continued, gaps in times]

    def hazard(self, number: int, age: float) -> float:
        """Return the probability per second that a turn of this class is continued now, ``age`` seconds after its end.

        It falls with the age, because a turn that was not continued so far may never be.
        """
        p, rate = self._p[number], self._rate[number]
        alive = p * exp(-rate * max(age, 0.0))
        return rate * alive / (alive + 1.0 - p)
