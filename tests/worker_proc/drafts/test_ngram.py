"""Prompt lookup against a simple search, over growing texts in rows that move."""

import pytest
from draft_batches import DraftBatch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.native.library import Native, load_native
from quire.worker_proc.drafts.ngram import NgramProposer

NATIVES = pytest.mark.parametrize("native", [load_native(), None], ids=["native", "numpy"])
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def plain(text: list[int], low: int, high: int, wanted: int) -> list[int]:
    """Search for the latest occurrence of the longest run, and copy the tokens after it, drafts included."""
    for length in range(high, low - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                longer = list(text)
                for at in range(end, end + wanted):
                    longer.append(longer[at])
                return longer[len(text) :]
    return []


@pytest.mark.full
@NATIVES
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_drafts_equal_a_simple_search(native: Native | None, data: st.DataObject) -> None:
    rows = DraftBatch(max_rows=4, max_len=256)
    proposer = NgramProposer(rows.batch, 2, 4, 5, native)
    held: list[int] = []
    for step in range(data.draw(st.integers(2, 8))):
        removed = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        held = [handle for handle in held if handle not in removed]
        new = {10 * step + i: data.draw(TEXTS) for i in range(data.draw(st.integers(0, 4 - len(held))))}
        rows.change(removed, new)
        held += new
        asked = [handle for handle in held if data.draw(st.booleans())]
        for handle in asked:
            rows.extend(handle, data.draw(TEXTS))
        if not asked:
            continue
        wanted = {rows.batch.row(handle): data.draw(st.integers(1, 5)) for handle in asked}
        drafts = proposer.propose(wanted)
        for handle in asked:
            row = rows.batch.row(handle)
            assert drafts.get(row, []) == plain(rows.text(handle), 2, 4, wanted[row])


@NATIVES
def test_long_runs_in_long_texts(native: Native | None) -> None:
    rows = DraftBatch(max_len=512)
    proposer = NgramProposer(rows.batch, 1, 40, 3, native)
    long = list(range(40, 80))
    rows.change([], {1: [*long, 7, 99, *range(300, 500), 79, 5, *long], 2: [5, 6, 5], 3: [4]})
    assert proposer.propose({0: 2, 1: 3, 2: 2}) == {0: [7, 99], 1: [6, 5, 6]}


@NATIVES
def test_row_is_not_searched_for_an_earlier_request(native: Native | None) -> None:
    rows = DraftBatch()
    proposer = NgramProposer(rows.batch, 1, 2, 1, native)
    rows.change([], {1: [1, 2, 3, 1, 2]})
    assert proposer.propose({0: 1}) == {0: [3]}
    rows.change([1], {2: [9, 8, 7, 1, 2]})
    assert proposer.propose({0: 1}) == {}
