"""The ``adapter_config.json`` of a LoRA adapter in the format of PEFT: rank and scale of each module."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields

CONFIG = "adapter_config.json"
MAX_PATTERNS = 4096
MAX_PATTERN_LENGTH = 256
MAX_PATTERN_WORK = 2**20
"""States and transitions made and tried, about a second of work. The full names of 882 modules need two thirds."""
_STATE_WORK = 16
_ALLOWED = f"at most {MAX_PATTERN_LENGTH} characters, classes, groups, | and quantifiers"
_ESCAPE = r"\\[\W_dDsSwW]"
_ATOM = rf"{_ESCAPE}|\[\^?(?:-?(?:{_ESCAPE}|[^][\\&~|-]))+-?\]|[^][{{}}()\\|*+?]"
_COUNT = r"[*+?]\??|\{(?!\})\d{0,3}(?:,\d{0,3})?\}\??"
_TOKEN = re.compile(rf"{_ATOM}|{_COUNT}|\((?:\?:)?|[|)]")

Value = TypeVar("Value")
Test = Callable[[str], object]
"""A test of a symbol, which is a character, ``begin``, ``end``, or ``empty`` after each character."""
Group = list[list[tuple["Test | Group", int, int]]]
"""Alternatives, each a sequence of tests and groups, with their repetitions; the most are -1 if there is no limit."""
_ENDS: dict[str, Test] = {"^": "begin".__eq__, "$": "end".__eq__}
_EMPTY: Test = re.compile("begin|end|empty").fullmatch

_REFUSED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "velora_config": "VeLoRA is not supported",
    "lora_bias": "biases of an adapter are not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "layer_replication": "replicated layers are not supported",
    "modules_to_save": "only LoRA matrices are supported, no whole modules: merge it into the model",
    "trainable_token_indices": "trained embeddings of tokens are not supported",
}
"""Settings that change what an adapter computes, so that it cannot be served: why."""

_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which training changed the model's own weights too."""


class AdapterError(ConfigError):
    """An adapter cannot be served; one line that names the folder, the value, and what is allowed."""


class NamePatterns(Generic[Value]):
    """Patterns of module names, and their values. They match as in PEFT: a whole name, or what follows one of its dots.

    They match without backtracking, so that no pattern can stop a process.

    All patterns are one automaton. It reads names from their ends, where they differ most, and computes a step when a
    name first needs it. A state tests one character.
    """

    def __init__(self, patterns: Mapping[str, Value], refuse: Callable[[str], Exception]) -> None:
        """``refuse``: makes the error, of a reason, for a pattern that is not supported or for patterns too complex."""
        self._refuse = refuse
        self._work = 0
        self._tests: list[Test] = []
        self._next: list[set[int]] = []
        self._values: dict[int, Value] = {}
        """By the state that a match reaches: the lowest one is that of the first pattern."""
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        starts: set[int] = set()
        for pattern, value in patterns.items():
            matched = self._enter(_EMPTY, set())
            self._values[max(matched)] = value
            try:
                if len(pattern) > MAX_PATTERN_LENGTH or "".join(_TOKEN.findall(pattern)) != pattern:
                    raise ValueError
                re.compile(pattern)
                whole = _TOKEN.findall(rf"(?:.*\.)?({pattern})$")
                starts |= self._enter(_parse_group(whole[::-1]), matched)
            except (ValueError, re.error):
                raise refuse(f"has the pattern {printable(pattern)}; supported: {_ALLOWED}") from None
        self._starts = frozenset(starts)

    def find(self, name: str, default: Value) -> Value:
        """Return the value of the first pattern that matches a name."""
        states = self._starts
        for symbol in ("end", *reversed(name), "begin"):
            found = self._steps.get((states, symbol))
            states = self._step(states, symbol) if found is None else found
        matched = min((state for state in states if state in self._values), default=-1)
        return self._values.get(matched, default)

    def _step(self, states: frozenset[int], symbol: str) -> frozenset[int]:
        # A character ends all other states. "begin" and "end" do not, because these may be without ^ and $.
        found: set[int] = set() if len(symbol) == 1 else set(states)
        new = self._reached(states, symbol)
        while new := new - found:
            found |= new
            new = self._reached(new, symbol if len(symbol) > 1 else "empty")
        return self._steps.setdefault((states, symbol), frozenset(found))

    def _reached(self, states: Collection[int], symbol: str) -> set[int]:
        reached = [self._next[state] for state in states if self._tests[state](symbol)]
        self._spend(len(states) + sum(map(len, reached)))
        return set().union(*reached)

    def _enter(self, part: Test | Group, after: set[int]) -> set[int]:
        """Return the states that test a part's last characters; those of ``after`` follow its first ones."""
        self._spend(_STATE_WORK)
        if not isinstance(part, list):
            self._tests.append(part)
            self._next.append(after)
            return {len(self._tests) - 1}
        entered: set[int] = set()
        for sequence in part:
            states = after
            for inner, low, high in sequence:
                for _ in range(low):
                    states = self._enter(inner, states)
                for _ in range(low, high):
                    states = states | self._enter(inner, states)
                    self._spend(len(states))
                if high < 0:  # an empty state leads back to itself
                    loop = self._enter(_EMPTY, set(states))
                    self._next[max(loop)] |= self._enter(inner, loop)
                    states = loop
            entered |= states
        return entered

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_PATTERN_WORK:
            raise self._refuse("has patterns that are too complex: use the modules' names")


def _parse_group(tokens: list[str]) -> Group:
    """Take a group from the end of ``tokens``, which are those of a valid pattern in reverse."""
    group: Group = [[]]
    while tokens and (token := tokens.pop()) != ")":
        if token == "|":
            group.append([])
            continue
        part = _parse_group(tokens) if token[0] == "(" else _ENDS.get(token) or re.compile(token).fullmatch
        count = tokens.pop() if tokens and re.fullmatch(_COUNT, tokens[-1]) else "{1}"
        count = {"*": "{0,", "+": "{1,", "?": "{0,1"}.get(count[0], count.rstrip("?}"))
        lows, comma, highs = count[1:].partition(",")
        group[-1].append((part, int(lows or 0), int(highs) if highs else -1 if comma else int(lows)))
    return group


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """
    Attributes:
        rank, alpha: of modules that no pattern matches.
        rank_patterns, alpha_patterns: values of the modules that a pattern matches; the first one counts.
        rslora: scales are ``alpha / sqrt(rank)`` (arXiv 2312.03732) instead of ``alpha / rank`` (arXiv 2106.09685).
    """

    rank: int
    alpha: float
    rank_patterns: NamePatterns[int]
    alpha_patterns: NamePatterns[float]
    rslora: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model."""
        return self.rank_patterns.find(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product."""
        alpha, rank = self.alpha_patterns.find(module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def parse_adapter_config(raw: dict[str, Any], path: Path, max_rank: int) -> AdapterConfig:
    """Return the settings of an adapter.

    Raises:
        AdapterError: it is not a LoRA adapter, or a setting is refused, of a wrong type or out of range.
    """
    try:
        return _parse(Fields(raw, str(path)), max_rank)
    except AdapterError:
        raise
    except ConfigError as error:
        raise AdapterError(str(error)) from None


def _parse(field: Fields, max_rank: int) -> AdapterConfig:
    raw, where = field.raw, field.where
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{where}: peft_type must be 'LORA' (got {printable(raw.get('peft_type'))})")
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise AdapterError(f"{where}: {name} is set: {reason}")
    if raw.get("bias") not in (None, "none"):
        raise AdapterError(f"{where}: bias must be 'none' (got {printable(raw['bias'])})")
    initial = raw.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGES_MODEL):
        raise AdapterError(
            f"{where}: init_lora_weights {printable(initial)} has changed the model's own weights too: convert the "
            "adapter to plain LoRA when it is saved"
        )

    def rank(value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= max_rank:
            raise AdapterError(
                f"{where}: {name} must be an integer from 1 to {max_rank} (got {printable(value)}): the highest rank "
                "is that of --max-lora-rank"
            )
        return value

    def alpha(value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise AdapterError(f"{where}: {name} must be a number from 0 to 1e6 (got {printable(value)})")
        return float(value)

    return AdapterConfig(
        rank=rank(raw.get("r"), "r"),
        alpha=alpha(raw.get("lora_alpha"), "lora_alpha"),
        rank_patterns=_patterns(field, "rank_pattern", rank),
        alpha_patterns=_patterns(field, "alpha_pattern", alpha),
        rslora=field.flag("use_rslora"),
    )


def _patterns(field: Fields, name: str, check: Callable[[object, str], Value]) -> NamePatterns[Value]:
    patterns = field.raw.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{field.where}: {name} must be an object with at most {MAX_PATTERNS} entries")
    values = {key: check(value, f"{name}[{printable(key)}]") for key, value in patterns.items()}
    return NamePatterns(values, lambda reason: AdapterError(f"{field.where}: {name} {reason}"))
