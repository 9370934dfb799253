"""Suffix decoding: frequency decides, a limited number of outputs is kept, prompts are not shared."""

from draft_batches import DraftBatch

from quire.worker_proc.drafts.suffix import MAX_DRAFTS_PER_MATCHED, SuffixProposer


def answered(rows: DraftBatch, proposer: SuffixProposer, handle: int, prompt: list[int], answer: list[int]) -> None:
    """Run one request alone, from its prompt to its removal."""
    rows.change([], {handle: prompt})
    rows.extend(handle, answer)
    proposer.propose({rows.batch.row(handle): 1})
    rows.change([handle], {})


def test_more_frequent_continuation_is_drafted() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 0)
    rows.change([], {1: [1, 2, 5, 6, 0, 1, 2, 5, 7, 9, 1, 2, 8, 8, 3, 1, 2]})
    # After 1 2: 5 twice and 8 once, though 8 is newer. After 1 2 5: 6 and 7 once each, 7 is newer.
    assert proposer.propose({0: 4})[0][:3] == [5, 7, 9]


def test_longest_run_has_priority_over_frequency() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 0)
    rows.change([], {1: [4, 3, 2, 1, 50, 9, 1, 60, 8, 1, 60, 7, 1, 60, 4, 3, 2, 1]})
    assert proposer.propose({0: 1}) == {0: [50]}


def test_short_match_gives_few_drafts() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 0)
    rows.change([], {1: [1, 20, 21, 22, 23, 24, 1]})
    assert proposer.propose({0: 5}) == {0: [20, 21, 22, 23, 24][:MAX_DRAFTS_PER_MATCHED]}


def test_loop_is_drafted_to_full_length() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 0)
    rows.change([], {1: [1, 2, 3] * 5})
    assert proposer.propose({0: 7}) == {0: [1, 2, 3, 1, 2, 3, 1]}


def test_drafts_use_earlier_outputs_but_not_their_prompts() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 4)
    answered(rows, proposer, 1, [30, 31, 32, 33], [11, 12, 13, 14, 15])
    rows.change([], {2: [40, 11, 12]})
    assert proposer.propose({0: 3}) == {0: [13, 14, 15]}
    rows.change([2], {3: [30, 31]})
    assert proposer.propose({0: 3}) == {}, "a prompt was shared"
    assert proposer.num_outputs == 1


def test_sharing_of_outputs_can_be_disabled() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 0)
    answered(rows, proposer, 1, [30], [11, 12, 13, 14, 15])
    rows.change([], {2: [40, 11, 12]})
    assert proposer.propose({0: 3}) == {}
    assert proposer.num_outputs == 0


def test_least_recently_used_output_is_evicted() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 2)
    answered(rows, proposer, 1, [30], [11, 12, 13])
    answered(rows, proposer, 2, [30], [21, 22, 23])
    rows.change([], {3: [11, 12]})
    assert proposer.propose({0: 1}) == {0: [13]}  # uses the first output, and leaves none itself
    rows.change([3], {})
    answered(rows, proposer, 4, [30], [31, 32, 33])
    assert proposer.num_outputs == 2
    for handle, (start, expected) in enumerate({11: [13], 21: [], 31: [33]}.items(), 10):
        rows.change([], {handle: [start, start + 1]})
        assert proposer.propose({0: 1}).get(0, []) == expected, start
        rows.change([handle], {})


def test_reused_texts_give_correct_drafts() -> None:
    rows = DraftBatch(max_rows=3)
    proposer = SuffixProposer(rows.batch, 8, 3)
    for turn in range(40):
        answered(rows, proposer, 1 + turn, [30], [1, 2, 3 + turn % 5, 1, 2, 3 + turn % 5])
        rows.change([], {1000 + turn: [1, 2]})
        (draft,) = proposer.propose({0: 1})[0]
        assert draft in {3 + max(turn - back, 0) % 5 for back in range(3)}
        rows.change([1000 + turn], {})


def test_texts_follow_moved_rows() -> None:
    rows = DraftBatch()
    proposer = SuffixProposer(rows.batch, 8, 0)
    rows.change([], {1: [1, 2, 9, 1, 2], 2: [1, 2, 8, 1, 2], 3: [1, 2, 7, 1, 2]})
    assert proposer.propose({0: 1, 1: 1, 2: 1}) == {0: [9], 1: [8], 2: [7]}
    rows.change([1], {})
    rows.extend(3, [7, 1, 2])
    assert proposer.propose({rows.batch.row(3): 1, rows.batch.row(2): 1}) == {
        rows.batch.row(3): [7],
        rows.batch.row(2): [8],
    }
