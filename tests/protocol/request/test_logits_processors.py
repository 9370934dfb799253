"""Updates of per-row states, and the adapter for callables that process one request each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protocol.request.logits_processors import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    MoveDirectionality,
    MovedRequest,
    apply_update,
)
from quire.protocol.request.sampling_params import SamplingParams

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP
NUM_ROWS = 5


def added(row: int, min_tokens: int) -> AddedRequest:
    return AddedRequest(row, SamplingParams(max_tokens=None, min_tokens=min_tokens), [], [])


def state_of(params: SamplingParams, prompt: list[int], output: list[int]) -> int | None:
    return params.min_tokens or None


@st.composite
def updates(draw: st.DrawFn) -> BatchUpdate:
    rows = st.integers(0, NUM_ROWS - 1)
    removed = sorted(draw(st.sets(rows)), reverse=True)
    new = [added(row, draw(st.integers(0, 2))) for row in draw(st.lists(rows, unique=True))]
    pairs = draw(st.lists(st.tuples(rows, rows).filter(lambda pair: pair[0] != pair[1]), max_size=4))
    moved = [MovedRequest(*pair, draw(st.sampled_from([ONE_WAY, SWAP]))) for pair in pairs]
    return BatchUpdate(NUM_ROWS, removed, new, moved)


@given(st.lists(updates(), max_size=6))
def test_states_equal_those_of_a_reference_batch(sequence: list[BatchUpdate]) -> None:
    """The reference batch has the request of each row, or None. An addition replaces, a move overwrites."""
    batch: list[SamplingParams | None] = [None] * NUM_ROWS
    entries: dict[int, int] = {}
    for update in sequence:
        before = dict(entries)
        for row in update.removed:
            batch[row] = None
        for new in update.added:
            batch[new.row] = new.params
        for source, target, direction in update.moved:
            first, second = batch[source], batch[target]
            batch[target], batch[source] = first, second if direction is SWAP else None
        changed = apply_update(entries, update, state_of)
        assert entries == {row: p.min_tokens for row, p in enumerate(batch) if p is not None and p.min_tokens}
        assert changed or entries == before


def test_no_update_changes_nothing() -> None:
    entries = {0: 1}
    assert not apply_update(entries, None, state_of)
    assert entries == {0: 1}


def test_updates_apply_in_the_order_removed_added_moved() -> None:
    entries = {0: 7, 1: 8}
    assert apply_update(
        entries, BatchUpdate(2, [1, 0], [added(0, 1), added(2, 3)], [MovedRequest(2, 1, ONE_WAY)]), state_of
    )
    assert entries == {0: 1, 1: 3}


class Row(list[float]):
    """Stands for a one-dimensional tensor."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


class PerRequest(AdapterLogitsProcessor):
    """A request names its callable in ``extra_args``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Any] | None:
        wanted = params.extra_args.get("callable")
        return None if wanted is None else CALLABLES[str(wanted)]


def add_lengths(prompt: list[int], output: list[int], logits: Row) -> Row:
    return Row(value + 10 * len(prompt) + len(output) for value in logits)


def add_in_place(output: list[int], logits: Row) -> Row:
    logits[0] += len(output)
    return logits


CALLABLES: dict[str, Callable[..., Any]] = {
    "two": add_in_place,
    "three": add_lengths,
    "four": lambda a, b, c, d: d,
    "one": lambda logits: logits,
    "longer": lambda output, logits: Row([*logits, 0.0]),
}


def adapter_with(*wanted: str | None) -> tuple[PerRequest, list[list[int]]]:
    outputs: list[list[int]] = [[] for _ in wanted]
    new = [
        AddedRequest(
            row, SamplingParams(extra_args={} if name is None else {"callable": name}), [1, 2, 3], outputs[row]
        )
        for row, name in enumerate(wanted)
    ]
    adapter = PerRequest(SimpleNamespace(), None, False)  # type: ignore[arg-type]
    adapter.update_state(BatchUpdate(len(new), [], new, []))
    return adapter, outputs


def test_callables_with_two_and_three_parameters_see_the_live_answer() -> None:
    adapter, outputs = adapter_with("two", None, "three")
    outputs[0] += [5, 5]
    outputs[2] += [5]
    logits = [Row([0.0, 0.0]) for _ in range(3)]
    assert adapter.apply(logits) == [[2.0, 0.0], [0.0, 0.0], [31.0, 31.0]]
    outputs[2].append(6)
    assert adapter.apply([Row([0.0]), Row([0.0]), Row([0.0])])[2] == [32.0]


@pytest.mark.parametrize(("name", "count"), [("four", 4), ("one", 1)])
def test_other_numbers_of_parameters_are_refused(name: str, count: int) -> None:
    with pytest.raises(ValueError, match=f"must have 2 or 3 parameters \\(got {count}\\)"):
        adapter_with(name)


def test_callable_that_changes_the_shape_is_refused() -> None:
    adapter, _ = adapter_with("longer")
    with pytest.raises(ValueError, match="must keep the shape"):
        adapter.apply([Row([0.0, 0.0])])
