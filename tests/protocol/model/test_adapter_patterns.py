"""Patterns of module names beside ``re`` with the expression that PEFT matches."""

import re
from random import Random

import pytest

from quire.protocol.model.adapter_config import NamePatterns


class RefusedError(Exception):
    pass


MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.experts.3.down_proj", "mlp.experts.12.up_proj")
NAMES = [f"{top}model.layers.{layer}.{module}" for top in ("", "x.") for layer in (0, 1, 10) for module in MODULES]
USUAL = (
    *("q_proj", "attn.q_proj", "layers.1.mlp.up_proj", *NAMES[:3], r".*\.q_proj", r"layers\.(0|1)\.", "1.mlp.up_proj"),
    *(r"^model\.layers\.[0-9]+\.", r"^model\.layers\.[0-9]+\..*", r".*layers\.(?:0|1)\..*(q|k)_proj$", "^layers.*"),
    *(r"^model.*_proj|^x\.model.*up_proj$", r"model\.layers\.\d{1,2}\.mlp.*?", r"(.*\.)?up_proj", "[^.]*", r"[\w-]+j"),
    *(
        r"experts\.(\d|1[0-2]+)\.\w{2,7}",
        "(((q|k)_)+(p(r|x?)oj)??){1,}",
        "((a*)*|.)*j",
        "",
        "()",
        "|q_proj",
        "a^",
        "(^|x.)model.*(q_proj$|up_.*)",
        "(|q_)*",
    ),
)


def from_peft(patterns: dict[str, int], name: str) -> int:
    matched = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matched, -1)


def random_pattern(random: Random, depth: int = 3) -> str:
    if depth == 0:
        return random.choice((*"ab.1", r"\.", r"\d", "[ab]", "[^b1]", r"\w"))
    parts = [random_pattern(random, depth - 1) for _ in range(random.randint(1, 3))]
    whole = random.choice(("({})", "(?:{})", "{}")).format(random.choice(("", "|")).join(parts))
    repeated = random.choice(("", "", "", "*", "+", "?", "{2}", "{1,3}", "{0}", "{1,}", "+?"))
    return f"(?:{whole}){repeated}" if repeated else whole


def test_matches_are_those_of_peft() -> None:
    random = Random(7)
    short = ["".join(random.choices("aab.1", k=random.randint(0, 6))) + "b" for _ in range(40)]
    for pattern, names in [*((each, NAMES) for each in USUAL), *((random_pattern(random), short) for _ in range(100))]:
        made = NamePatterns({pattern: 1}, RefusedError)
        expected = {name: from_peft({pattern: 1}, name) for name in names}
        assert {name: made.find(name, -1) for name in names} == expected, pattern
    together = {pattern: number for number, pattern in enumerate(reversed(USUAL))}
    made = NamePatterns(together, RefusedError)
    assert [made.find(name, -1) for name in NAMES] == [from_peft(together, name) for name in NAMES]


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "[", "*a", "a**", "a*+", "a{3,2}", "a{9999}", "a{,2}", "[[:alpha:]]", "a)|(b"),
        *(r"(?!a)b", "(?i)a", r"(a)\1", r"\pN", r"\Qa", "[z-a]", "a\\", "x" * 257, "\ud800"),
    ],
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(RefusedError, match=r"has the pattern .*; supported: at most 256 characters, in the common"):
        NamePatterns({pattern: 1}, RefusedError)


def test_no_patterns_take_for_ever() -> None:
    patterns = [f"(.*[a-m].{{{20 + i % 30}}}|.*[n-z].{{{25 + i % 20}}})*{i}" for i in range(600)]
    with pytest.raises(RefusedError, match="too complex together: merge or shorten them"):
        NamePatterns(dict.fromkeys(patterns, 1), RefusedError)
