"""Each kind of cache, in every combination of prefix cache, chunks, drafts, and preemption, forks or lost workers.

Tokens are those of transformers; with ``--deterministic`` bits are those of a request that is computed alone.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from cache_table import BLOCK_SIZE, CELLS, CHUNKS, EVENTS, Asked, Cell, Course, Expected
from checkpoints import FAMILIES as NATIVE
from checkpoints import make_checkpoint
from measured_here import measure_here
from tiny_models import make_tiny

from quire.launch.config.implementation import read_model
from quire.protocol.model.model_config import ModelConfig

pytestmark = pytest.mark.full

STATES = ("qwen3_next", "qwen3_5_text", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2")
FAMILIES = (*STATES, "deepseek_v3", "glm4_moe_lite", "llama4")
"""With states, in transformers; with latents, and with chunks of 16 tokens, in Quire's own code."""
SMALL_POOLS = dict.fromkeys(FAMILIES, 15) | {"llama4": 22}
"""Blocks, in which the last request fits alone. Three groups of Llama 4 keep a chunk."""

Made = tuple[Path, ModelConfig, Expected]


def three(family: str) -> list[Cell]:
    """Return a cell of each event. Those of all families are different, and have each triple of values."""
    at = FAMILIES.index(family)
    return [
        Cell((at + at // 6 + n) % 2 == 0, CHUNKS[(at + n) % 3], event, (at // 3 + n) % 2 == 0)
        for n, event in enumerate(EVENTS)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Made]]:
    """Return a factory of checkpoints, each with its configuration and with transformers' answers."""

    @functools.cache
    def make(family: str) -> Made:
        folder = tmp_path_factory.mktemp(family)
        model: Any = make_checkpoint(folder, family) if family in NATIVE else make_tiny(folder, family)
        return folder, read_model(folder), Expected(model)

    with pytest.MonkeyPatch.context() as patch:
        measure_here(patch)
        yield make


def play(family: str, made: Made, cell: Cell, **settings: Any) -> Course:
    """Play a cell, in which everything happens that it names."""
    folder, model, expected = made
    if cell.event == "preemption":
        settings |= {"num_blocks_override": SMALL_POOLS[family]}
    course = Course(folder, model, expected, cell, **settings)
    course.play()
    statistics, answers = course.engine.statistics(), course.engine.answers
    assert (statistics.num_preemptions > 0) == (cell.event == "preemption")
    assert not cell.drafts or 0 < statistics.num_accepted_tokens < statistics.num_draft_tokens
    # In a small pool the branch finds what is left.
    sharing = ["turn two"] if cell.event == "preemption" else ["branch", "turn two"]
    assert {answers[name].num_cached_tokens >= 128 for name in sharing} == {cell.caching}
    # Only a child that has its parent's state and blocks begins in the middle of a block.
    children = [answers[name].num_cached_tokens for name in answers if name.startswith("child")]
    assert any(number % BLOCK_SIZE for number in children) == (cell.event == "fork")
    return course


def table(family: str) -> list[Any]:
    """Return parameters for a test of a family: three cells, and all of them."""
    some, every = pytest.param(family, three(family)), pytest.param(family, CELLS, marks=pytest.mark.slow)
    return [some._replace(id=f"{family}-3"), every._replace(id=f"{family}-{len(CELLS)}")]


def test_the_cells_of_all_families_have_each_triple_of_values() -> None:
    cells = [astuple(cell) for family in FAMILIES for cell in three(family)]
    every = [astuple(cell) for cell in CELLS]
    for axes in combinations(range(4), 3):
        of_axes = itemgetter(*axes)
        assert {*map(of_axes, cells)} == {*map(of_axes, every)}
    assert len(set(cells)) == 3 * len(FAMILIES) <= len(every) == 36


@pytest.mark.parametrize("family, cells", [each for family in FAMILIES for each in table(family)])
def test_tokens(family: str, cells: list[Cell], made: Callable[[str], Made]) -> None:
    unequal, distinct = [], set[int]()
    for cell in cells:
        course = play(family, made(family), cell)
        unequal += [f"{cell} {name}" for name in course.asked if course.answer(name)[0] != course.wanted(name)]
        distinct.update(*(course.answer(name)[0] for name in course.asked))
    assert not unequal
    assert len(distinct) > 4, "a model that repeats a few tokens shows nothing"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_bits(family: str, made: Callable[[str], Made]) -> None:
    folder, model, expected = made(family)
    alone = Course(folder, model, expected, Cell(False, 512, "", False), deterministic=True)

    @functools.cache
    def bits(asked: Asked) -> object:
        name = str(len(alone.asked))
        alone.ask(name, asked)
        alone.engine.run()
        return alone.answer(name)

    unequal = []
    for cell in CELLS:
        course = play(family, made(family), cell, deterministic=True)
        unequal += [f"{cell} {name}" for name, asked in course.asked.items() if course.answer(name) != bits(asked)]
    assert not unequal
