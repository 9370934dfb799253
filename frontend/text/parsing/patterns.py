"""Regular expressions that are matched character by character, in time linear in the text.

The patterns come from checkpoints, and the text from a model, so neither may make the match slow; and a match must not
depend on how the text is split. Python's ``re`` has neither property: its syntax tree is executed here as a list of
threads in order of preference (Pike, 1987), which finds the same leftmost match as backtracking does.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as syntax  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_STEPS = 2048
"""Most instructions of one pattern, after its repetitions are written out."""
END = "\0end"
"""Where the match ends, if a look-ahead follows."""

Test = Callable[[str], bool]
Captures = Mapping[str, int]


class PatternError(ValueError):
    """The pattern does not parse, or needs what this matcher does not have."""


class Match(NamedTuple):
    """A match from ``start`` to ``end``. ``marks``: where named groups start and end."""

    start: int
    end: int
    marks: Captures


class Thread(NamedTuple):
    """An unfinished match from ``start`` on, which needs the character of instruction ``place`` next."""

    place: int
    start: int
    marks: Captures


@dataclass(frozen=True, slots=True)
class _Instruction:
    """A character to consume (``test``), or a fork to ``then`` in order of preference; ``mark`` records the place."""

    then: tuple[int, ...]
    test: Test | None = None
    mark: str = ""


class Pattern:
    """A compiled pattern. ``first`` is the source of a character class of all characters that can begin a match."""

    def __init__(self, source: str) -> None:
        """Raise PatternError for syntax that is not supported: anchors, references, look-behind, an empty match."""
        try:
            flags = re.compile(source, re.DOTALL).flags
            tree = list(syntax.parse(source, re.DOTALL))
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(str(error)) from None
        if flags & ~(re.DOTALL | re.UNICODE):
            raise PatternError("inline flags are not supported")
        self._build(tree, _group_names(source))

    @classmethod
    def of_tree(cls, tree: Sequence[Any], names: Mapping[int, str]) -> "Pattern":
        """Return the pattern of a part of a parsed pattern."""
        pattern = cls.__new__(cls)
        pattern._build(list(tree), names)
        return pattern

    def _build(self, tree: list[Any], names: Mapping[int, str]) -> None:
        code = _Code(names)
        entry = code.sequence(tree, code.add(_Instruction(())), at_end=True)
        self.tests = [instruction.test for instruction in code.steps]
        self.after = [code.closure(each.then[0]) if each.test is not None else () for each in code.steps]
        self.entry = code.closure(entry)
        if any(place == 0 for place, _ in self.entry):
            raise PatternError("it matches the empty text")
        self.may_be_empty = any(END in marks for _, marks in self.entry)
        """Whether a match can be empty, before a look-ahead."""
        self.first = code.first([place for place, _ in self.entry])


class Search:
    """Search for the leftmost match of one pattern in a stream of characters."""

    __slots__ = ("_begins", "_pattern", "match", "threads")

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._begins = _Class(pattern.first)
        self._begins[""] = True
        self.threads: list[Thread] = []
        """Unfinished matches, the preferred one first, so that the first begins leftmost."""
        self.match: Match | None = None
        """The match so far; only a preferred thread can replace it."""

    def reset(self) -> None:
        self.threads, self.match = [], None

    def step(self, char: str, at: int) -> None:
        """Consume the character at place ``at``; "" is the end of the text."""
        pattern, threads = self._pattern, self.threads
        if self.match is None and self._begins[char]:
            threads = [*threads, *(Thread(place, at, dict.fromkeys(marks, at)) for place, marks in pattern.entry)]
        if not threads:
            return
        tests, after = pattern.tests, pattern.after
        alive: list[Thread] = []
        seen: set[int] = set()
        for place, start, before in threads:
            test = tests[place]
            if test is None or not test(char):
                continue
            for target, names in after[place]:
                if target in seen:
                    continue
                seen.add(target)
                marks = {**before, **dict.fromkeys(names, at + len(char))} if names else before
                if target == 0:
                    self.match = Match(start, marks.get(END, at + len(char)), marks)
                    self.threads = alive
                    return
                alive.append(Thread(target, start, marks))
        self.threads = alive


class _Class(dict[str, bool]):
    """Whether a character is in the class; each answer is computed once."""

    def __init__(self, source: str) -> None:
        self._matches = re.compile(source, re.DOTALL).match

    def __missing__(self, char: str) -> bool:
        found = self._matches(char) is not None
        if len(self) < 4096:
            self[char] = found
        return found


class _Code:
    """Instructions of one pattern; number 0 is the match."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.steps: list[_Instruction] = []
        self._sources: dict[int, str] = {}
        self._names = names

    def add(self, instruction: _Instruction) -> int:
        if len(self.steps) >= MAX_STEPS:
            raise PatternError(f"it needs more than {MAX_STEPS} steps")
        self.steps.append(instruction)
        return len(self.steps) - 1

    def sequence(self, tree: Sequence[Any], then: int, *, at_end: bool = False) -> int:
        """Add the nodes, which continue at ``then``; return where they begin."""
        for i, (kind, value) in reversed(list(enumerate(tree))):
            if kind is codes.ASSERT and at_end and i == len(tree) - 1 and value[0] > 0:
                then = self.add(_Instruction((self.sequence(value[1], then),), mark=END))
            else:
                then = self._node(kind, value, then, at_end=at_end and i == len(tree) - 1)
        return then

    def _node(self, kind: Any, value: Any, then: int, *, at_end: bool) -> int:
        if kind is codes.AT and value is codes.AT_END_STRING:
            return self._add_test(then, "(?!)", lambda char: not char)
        source = _class_source(kind, value)
        if source is not None:
            return self._add_test(then, source, _Class(source).__getitem__)
        if kind is codes.SUBPATTERN:
            group, add_flags, del_flags, inside = value
            if add_flags or del_flags:
                raise PatternError("inline flags are not supported")
            name = self._names.get(group, "")
            if not name:
                return self.sequence(inside, then, at_end=at_end)
            stop = self.add(_Instruction((then,), mark=f"{name}\0stop"))
            return self.add(_Instruction((self.sequence(inside, stop, at_end=at_end),), mark=f"{name}\0start"))
        if kind is codes.BRANCH:
            # The end of the text closes a region in any case.
            branches = [each for each in value[1] if list(each) not in (AT_END if at_end else AT_END[:1])]
            return self.add(_Instruction(tuple(self.sequence(each, then, at_end=at_end) for each in branches)))
        if kind in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inside = value
            return self._repeat(least, most, inside, then, greedy=kind is codes.MAX_REPEAT)
        raise PatternError(f"{UNSUPPORTED.get(kind, str(kind).lower())} are not supported")

    def _add_test(self, then: int, source: str, test: Test) -> int:
        place = self.add(_Instruction((then,), test=test))
        self._sources[place] = source
        return place

    def _repeat(self, least: int, most: int, inside: Sequence[Any], then: int, *, greedy: bool) -> int:
        if most is codes.MAXREPEAT:
            branch = self.add(_Instruction(()))
            body = self.sequence(inside, branch)
            self.steps[branch] = _Instruction((body, then) if greedy else (then, body))
            then = branch
        else:
            skip = then
            for _ in range(most - least):
                body = self.sequence(inside, then)
                then = self.add(_Instruction((body, skip) if greedy else (skip, body)))
        for _ in range(least):
            then = self.sequence(inside, then)
        return then

    def closure(self, place: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the characters to consume next from ``place`` in order of preference, with the marks passed."""
        found: dict[int, tuple[str, ...]] = {}
        seen: set[int] = set()
        waiting: list[tuple[int, tuple[str, ...]]] = [(place, ())]
        while waiting:
            at, marks = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            instruction = self.steps[at]
            if at == 0 or instruction.test is not None:
                found[at] = marks
                continue
            marks = (*marks, instruction.mark) if instruction.mark else marks
            waiting.extend((each, marks) for each in reversed(instruction.then))
        return tuple(found.items())

    def first(self, places: Sequence[int]) -> str:
        return "|".join(dict.fromkeys(self._sources[place] for place in places))


def named(marks: Captures, text: str, base: int) -> dict[str, str]:
    """Return the named groups of a match, given the text that begins at place ``base``."""
    names = [key[: -len("\0stop")] for key in marks if key.endswith("\0stop")]
    return {name: text[marks[f"{name}\0start"] - base : marks[f"{name}\0stop"] - base] for name in names}


def _group_names(source: str) -> dict[int, str]:
    return {number: name for name, number in re.compile(source, re.DOTALL).groupindex.items()}


def split_at_group(source: str, name: str) -> tuple[Pattern, Pattern] | None:
    """Return what precedes and follows the group ``name`` if the group is ``.*?``, otherwise None."""
    tree = list(syntax.parse(source, re.DOTALL))
    names = _group_names(source)
    for i, (kind, value) in enumerate(tree):
        if kind is codes.SUBPATTERN and names.get(value[0]) == name:
            inside = list(value[3])
            lazy = len(inside) == 1 and inside[0][0] is codes.MIN_REPEAT and inside[0][1][:2] == (0, codes.MAXREPEAT)
            if not lazy or list(inside[0][1][2]) != [(codes.ANY, None)]:
                return None
            return Pattern.of_tree(tree[:i], names), Pattern.of_tree(tree[i + 1 :], names)
    return None


@lru_cache(maxsize=256)
def literal(*texts: str) -> Pattern:
    """Return the pattern of any of these texts, the longest first."""
    return Pattern("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


AT_END = ([(codes.AT, codes.AT_END)], [(codes.AT, codes.AT_END_STRING)])
UNSUPPORTED = {
    codes.AT: "anchors",
    codes.ASSERT: "look-arounds before the end",
    codes.ASSERT_NOT: "negative look-arounds",
    codes.GROUPREF: "references",
}
CATEGORIES = {
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
}


def _class_source(kind: Any, value: Any) -> str | None:
    """Return the source of a node that matches one character, or None for other nodes."""
    if kind is codes.LITERAL:
        return re.escape(chr(value))
    if kind is codes.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    if kind is codes.ANY:
        return "."
    if kind is codes.CATEGORY:
        return CATEGORIES[value]
    if kind is not codes.IN:
        return None
    parts = []
    for item, operand in value:
        if item is codes.NEGATE:
            parts.append("^")
        elif item is codes.RANGE:
            low, high = operand
            parts.append(f"{re.escape(chr(low))}-{re.escape(chr(high))}")
        else:
            parts.append(_class_source(item, operand) or "")
    return f"[{''.join(parts)}]"
