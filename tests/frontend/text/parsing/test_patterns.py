"""Patterns against Python's ``re``, and what they refuse."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.frontend.text.parsing.patterns import Pattern, PatternError, Search, literal, named, split_at_group
from quire.frontend.text.parsing.scanner import Scanner

PATTERNS = (
    *(r"\s*<a>", r"<a>(?P<n>[^>\n]+)>", r"</f>\s*</a>", r"a|ab|abc", r"(?:<a>)?\s*<f=(?P<n>\w+)>"),
    *(r"x(?=ab*c)", r"a{1,3}?b", r"(?:ab?)+c", r"[^ab<]+<", r"a.+?b", r"(?P<n>a|ab)(?P<m>c|bc)", r"\Sf|\W\d"),
)


def find(pattern: Pattern, text: str) -> tuple[int, int, dict[str, str]] | None:
    search = Search(pattern)
    for at, char in enumerate(text):
        search.step(char, at)
        if search.match is not None and not search.threads:
            break
    match = search.match
    return None if match is None else (match.start, match.end, named(match.marks, text, 0))


@pytest.mark.parametrize("source", PATTERNS)
def test_same_match_as_re(source: str) -> None:
    pattern = Pattern(source)

    @given(st.text(alphabet="ab <>/f=x\nc1", max_size=14))
    @settings(max_examples=examples(150), deadline=None)
    def check(text: str) -> None:
        match = re.search(source, text, re.DOTALL)
        groups = {} if match is None else {name: part for name, part in match.groupdict().items() if part is not None}
        assert find(pattern, text) == (None if match is None else (match.start(), match.end(), groups))

    check()


@pytest.mark.parametrize(
    "source", ["a*", "", "^a", r"(?<=a)b", r"(a)\1", "(", "a{1,4000}", "(a{1,99}){1,99}", "(?i)a", r"a\b", "(?=a)b"]
)
def test_refused(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


def test_the_end_of_the_text_as_an_alternative() -> None:
    assert find(Pattern(r"(?:<end>|$)"), "a<end>") == (1, 6, {})
    assert find(Pattern(r"<end>|\Z"), "a<en") is None


def test_split_at_group() -> None:
    split = split_at_group(r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</>", "value")
    assert split is not None
    assert find(split[0], "<k>  v") == (0, 5, {"key": "k"})
    assert find(split[1], "v </>") == (1, 5, {})
    assert split_at_group("<(?P<value>.*)>", "value") is None
    assert split_at_group("<(?P<other>.*?)>", "value") is None


def scan(sources: list[str], pieces: list[str]) -> list[tuple[str, int, str]]:
    scanner = Scanner([Pattern(source) for source in sources])
    found: list[tuple[str, int, str]] = []
    before = ""
    for piece in [*pieces, None]:
        scanner.push(piece or "")
        while True:
            text, delimiter = scanner.next(last=piece is None)
            before += text
            if delimiter is None:
                break
            found.append((before, delimiter.which, delimiter.text))
            before = ""
            scanner.watch([Pattern(source) for source in sources])
    return [*found, (before, -1, "")]


def test_the_leftmost_then_the_longest_delimiter_is_found() -> None:
    assert scan(["ab", "b"], ["xab"]) == [("x", 0, "ab"), ("", -1, "")]
    assert scan(["ab", "abc"], ["a", "b", "cab"]) == [("", 1, "abc"), ("", 0, "ab"), ("", -1, "")]
    assert scan(["abcd", "b"], ["a", "b", "c", "x"]) == [("a", 1, "b"), ("cx", -1, "")]


def test_text_is_held_back_only_while_it_may_be_a_delimiter() -> None:
    scanner = Scanner([literal("<call>")])
    for piece, sent in (("a <", "a "), ("call", ""), ("x <c", "<callx "), ("<", "<c"), ("call>b", "")):
        scanner.push(piece)
        text, found = scanner.next()
        assert text == sent
    assert found is not None
    scanner.watch([])
    assert scanner.next(last=True) == ("b", None)
