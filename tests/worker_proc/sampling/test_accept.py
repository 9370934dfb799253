"""Positions of a step with drafts, and acceptance of their samples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.accept import accept_drafts

DRAFTS = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6)


@pytest.mark.full
@settings(max_examples=examples(300), deadline=None)
@given(DRAFTS, st.data())
def test_tokens_are_kept_while_all_drafts_before_them_are_accepted(
    drafts: list[list[int]], data: st.DataObject
) -> None:
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, 50), min_size=len(drafts), max_size=len(drafts)))))
    positions = SampledPositions.with_drafts(rows, drafts)
    samples = [data.draw(st.lists(st.integers(0, 2), min_size=len(d) + 1, max_size=len(d) + 1)) for d in drafts]
    got = accept_drafts(np.array([token for own in samples for token in own]), positions)
    at, kept, counts = 0, [], []
    for own, sampled in zip(drafts, samples, strict=True):
        count = 1
        while count <= len(own) and own[count - 1] == sampled[count - 1]:
            count += 1
        kept += range(at, at + count)
        counts.append(count)
        at += len(sampled)
    assert got.kept.tolist() == kept and got.counts.tolist() == counts
    assert got.drafts.tolist() == [len(own) for own in drafts]


@given(DRAFTS)
def test_position_has_the_drafts_before_it(drafts: list[list[int]]) -> None:
    rows = np.arange(len(drafts)) * 2
    positions = SampledPositions.with_drafts(rows, drafts)
    assert positions.any_drafts == any(drafts)
    at = 0
    for row, own in zip(rows.tolist(), drafts, strict=True):
        for offset in range(len(own) + 1):
            assert positions.rows[at] == row and positions.offsets[at] == offset
            assert positions.drafts[at - offset : at].tolist() == own[:offset]
            assert positions.drafts[at] == (own[offset] if offset < len(own) else -1)
            at += 1
    assert at == len(positions)


def test_without_drafts_each_row_has_one_position() -> None:
    positions = SampledPositions.one_per_row(np.array([2, 5]))
    assert not positions.any_drafts and positions.drafts.tolist() == [-1, -1]
    assert accept_drafts(np.array([7, 8]), positions).counts.tolist() == [1, 1]
