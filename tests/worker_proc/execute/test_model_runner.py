"""The model runner with hand-written diffs: tokens do not depend on chunks, blocks or other rows.

It runs a tiny decoder with random weights; each test chooses block ids, chunks and parking.
"""

from typing import Any

import pytest
from runner_steps import (
    PROMPT,
    Runner,
    adding,
    alone,
    appending,
)
from side_parts import parts_of

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.side_rows import LOGPROBS
from quire.protocol.wire.worker_messages import NewRequestData


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_chunks_and_scattered_blocks_give_the_same_tokens(sampling: dict[str, Any]) -> None:
    want = alone(PROMPT, 4, **sampling)
    runner = Runner()
    first = adding((3, PROMPT, [17, 4, 9]), **sampling) | {"counts": [(3, 2)]}
    assert runner.step(**first) == {}
    assert runner.step(counts=[(3, 3)]) == {}
    assert [runner.step()[3] for _ in range(4)] == want


def test_other_rows_change_no_token() -> None:
    runner = Runner()
    tokens = [runner.step(**adding((0, PROMPT, [1, 2, 3]), (1, [8, 8], [7, 6, 5])))]
    tokens += [runner.step() for _ in range(3)]
    assert [t[0] for t in tokens] == alone(PROMPT, 4)
    assert [t[1] for t in tokens] == alone([8, 8], 4)


def test_reads_prefix_written_by_another_row() -> None:
    runner = Runner()
    runner.step(**adding((0, PROMPT, [5, 6])))
    shared = adding((1, PROMPT, [5, 7, 8]), computed=4)
    assert runner.step(**shared)[1] == alone(PROMPT, 1)[0]


def test_reads_prefix_written_in_the_same_step() -> None:
    runner = Runner()
    both = adding((0, PROMPT, [5, 6]), (1, PROMPT, [5, 7]))
    both["new_requests"][1] = NewRequestData(1, "r1", 6, 6, 4, [2], SamplingParams(temperature=0.0), 7)
    tokens = runner.step(**both | {"counts": [(0, 6), (1, 2)]})
    assert tokens[0] == tokens[1] == alone(PROMPT, 1)[0]


def test_parked_row_continues_after_unparking() -> None:
    runner = Runner()
    got = [runner.step(**adding((0, PROMPT, [1, 2, 3]), (1, [8], [7, 8])))]
    got.append(runner.step(parked=[0]))
    got.append(runner.step())
    got.append(runner.step(unparked=[0]))
    got.append(runner.step())
    assert [t[0] for t in got if 0 in t] == alone(PROMPT, 3)
    assert [t[1] for t in got] == alone([8], 5)


def test_readmitted_request_continues_with_the_same_tokens() -> None:
    want = alone(PROMPT, 5, temperature=1.0)
    runner = Runner()
    tokens = [runner.step(**adding((0, PROMPT, [1, 2, 3]), (1, [8], [7, 8]), temperature=1.0))[0], runner.step()[0]]
    runner.step(removed=[0])
    tokens.append(runner.step(**adding((0, PROMPT + tokens, [9, 10, 11]), temperature=1.0))[0])
    tokens += [runner.step()[0] for _ in range(2)]
    assert tokens == want


def test_moved_rows_keep_all_their_state() -> None:
    runner = Runner()
    rows = [(0, PROMPT, [1, 2, 3]), (1, [8], [4, 5]), (2, [3, 3, 3], [6, 7])]
    got = [runner.step(**adding(*rows)), runner.step()]
    got += [runner.step(removed=[0]), runner.step(**adding((5, [4, 4], [2, 1])))]
    got.append(runner.step(removed=[1]))
    assert [t[2] for t in got] == alone([3, 3, 3], 5)
    assert [t[5] for t in got if 5 in t] == alone([4, 4], 2)


def test_appends_blocks_during_decode() -> None:
    runner = Runner()
    got = [runner.step(**adding((0, [1, 2, 3], [12])))[0], runner.step()[0]]
    got.append(runner.step(**appending(0, 0, [3]))[0])
    got += [runner.step()[0] for _ in range(3)]
    assert got == alone([1, 2, 3], 6)


def test_result_has_handles_only_after_changes() -> None:
    runner = Runner()
    first = runner.result(**adding((0, PROMPT, [1, 2, 3]), (1, [8], [4, 5])))
    assert first.handles is not None and first.handles.tolist() == [0, 1]
    assert runner.result().handles is None
    third = runner.result(removed=[0])
    assert third.handles is not None and third.handles.tolist() == [1]
    nothing = runner.result(removed=[1], **adding((2, PROMPT, [6, 7])) | {"counts": [(2, 3)]})
    assert nothing.tokens is None and nothing.handles is not None and nothing.handles.tolist() == []


def test_result_has_logprobs_of_the_requesting_rows() -> None:
    runner = Runner()
    fields = adding((0, PROMPT, [1, 2]), (1, [8], [4]))
    fields["new_requests"][1] = NewRequestData(1, "r1", 1, 1, 0, [1], SamplingParams(temperature=0.0, logprobs=2), 7)
    result = runner.result(**fields)
    assert result.tokens is not None
    ((_, _, rows),) = parts_of(result, LOGPROBS)
    assert rows[0].shape == (1, 3)
    (entry,) = LOGPROBS.value(rows)
    assert entry.token_id == entry.top[0][0] == result.tokens[1], "greedy: the sampled one is the best one"
    assert entry.rank == 1


def test_result_marks_non_finite_row_as_bad() -> None:
    runner = Runner()
    runner.step(**adding((4, PROMPT, [1, 2]), (9, [8], [4, 5])))
    for cache in runner.runner.forward.kv_caches:
        cache[:, 1] = float("nan")
    result = runner.result()
    assert result.bad == [4]
