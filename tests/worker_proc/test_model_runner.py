"""The runner by hand-written diffs: how work is cut changes no token, and what does not fit is refused.

A tiny decoder with random weights; block ids, chunks and parking are chosen by each test.
"""

from typing import Any

import numpy as np
import pytest

from quire.protocol.config import EngineConfig
from quire.protocol.kv_layout import kv_layout
from quire.protocol.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.protocol.model_config import ModelConfig
from quire.protocol.sampling_params import SamplingParams
from quire.worker_proc.input_batch import StepRefused
from quire.worker_proc.model_runner import ModelRunner
from quire.worker_proc.setup import make_runner

NUM_BLOCKS = 20
PROMPT = [5, 9, 2, 7, 7, 1]
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIG = EngineConfig(
    model=MODEL,
    model_path="",
    load_format="dummy",
    max_model_len=32,
    max_num_seqs=3,
    block_size=4,
    num_blocks_override=NUM_BLOCKS - 1,
    seed=11,
)


def appending(handle: int, group: int, block_ids: list[int]) -> dict[str, Any]:
    """Fields of a step that gives a held request these blocks."""
    return {
        "appended_handles": np.full(len(block_ids), handle, np.int32),
        "appended_groups": np.full(len(block_ids), group, np.int32),
        "appended_block_ids": np.array(block_ids, np.int32),
    }


class Runner:
    """A ModelRunner that is told steps in keywords, and numbers them."""

    def __init__(self) -> None:
        made, _ = make_runner(CONFIG, kv_layout(MODEL, 4, "float32"), lambda text: None, progress=False)
        self.runner: ModelRunner = made
        commit = made.tables.commit

        def commit_and_poison() -> None:
            commit()
            made.tables.poison()

        made.tables.commit = commit_and_poison  # type: ignore[method-assign]
        self.steps = 0
        self.handles: list[int] = []

    def step(self, **fields: Any) -> dict[int, int]:
        """Handle → token of the step."""
        result = self.result(**fields)
        if result.handles is not None:
            self.handles = result.handles.tolist()
        tokens = [] if result.tokens is None else result.tokens.tolist()
        return dict(zip(self.handles, tokens, strict=True))

    def result(self, **fields: Any) -> ModelRunnerOutput:
        self.steps += 1
        result = self.runner.execute(SchedulerOutput(self.steps, **fields)).result()
        self.runner.check()
        return result


def adding(*rows: tuple[int, list[int], list[int]], computed: int = 0, **sampling: Any) -> dict[str, Any]:
    """Fields of a step that adds (handle, tokens, blocks) rows, each computing all that is left of its tokens."""
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    new = [NewRequestData(h, f"r{h}", len(t), len(t), computed, [len(b)], params, 7) for h, t, b in rows]
    return {
        "new_requests": new,
        "token_ids": np.array([t for _, tokens, _ in rows for t in tokens], np.int32),
        "block_ids": np.array([b for _, _, blocks in rows for b in blocks], np.int32),
        "counts": [(h, len(t) - computed) for h, t, _ in rows if len(t) - computed != 1],
    }


def alone(prompt: list[int], n: int, **sampling: Any) -> list[int]:
    """Tokens of a prompt that has the runner for itself, each from a prefill of all before it."""
    tokens: list[int] = []
    for _ in range(n):
        tokens.append(Runner().step(**adding((0, prompt + tokens, [1, 2, 3, 4, 5, 6]), **sampling))[0])
    return tokens


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_chunks_and_scattered_blocks_give_the_same_tokens(sampling: dict[str, Any]) -> None:
    want = alone(PROMPT, 4, **sampling)
    runner = Runner()
    first = adding((3, PROMPT, [17, 4, 9]), **sampling) | {"counts": [(3, 2)]}
    assert runner.step(**first) == {}
    assert runner.step(counts=[(3, 3)]) == {}
    assert [runner.step()[3] for _ in range(4)] == want


def test_a_neighbour_changes_nothing() -> None:
    runner = Runner()
    tokens = [runner.step(**adding((0, PROMPT, [1, 2, 3]), (1, [8, 8], [7, 6, 5])))]
    tokens += [runner.step() for _ in range(3)]
    assert [t[0] for t in tokens] == alone(PROMPT, 4)
    assert [t[1] for t in tokens] == alone([8, 8], 4)


def test_a_prefix_that_another_row_wrote_is_read() -> None:
    runner = Runner()
    runner.step(**adding((0, PROMPT, [5, 6])))
    shared = adding((1, PROMPT, [5, 7, 8]), computed=4)
    assert runner.step(**shared)[1] == alone(PROMPT, 1)[0]


def test_a_prefix_written_in_the_same_step_is_read() -> None:
    runner = Runner()
    both = adding((0, PROMPT, [5, 6]), (1, PROMPT, [5, 7]))
    both["new_requests"][1] = NewRequestData(1, "r1", 6, 6, 4, [2], SamplingParams(temperature=0.0), 7)
    tokens = runner.step(**both | {"counts": [(0, 6), (1, 2)]})
    assert tokens[0] == tokens[1] == alone(PROMPT, 1)[0]


def test_a_parked_row_stands_still_and_goes_on_where_it_was() -> None:
    runner = Runner()
    got = [runner.step(**adding((0, PROMPT, [1, 2, 3]), (1, [8], [7, 8])))]
    got.append(runner.step(parked=[0]))
    got.append(runner.step())
    got.append(runner.step(unparked=[0]))
    got.append(runner.step())
    assert [t[0] for t in got if 0 in t] == alone(PROMPT, 3)
    assert [t[1] for t in got] == alone([8], 5)


def test_a_request_resumed_with_its_tokens_goes_on_as_if_nothing_had_been() -> None:
    want = alone(PROMPT, 5, temperature=1.0)
    runner = Runner()
    tokens = [runner.step(**adding((0, PROMPT, [1, 2, 3]), (1, [8], [7, 8]), temperature=1.0))[0], runner.step()[0]]
    runner.step(removed=[0])
    tokens.append(runner.step(**adding((0, PROMPT + tokens, [9, 10, 11]), temperature=1.0))[0])
    tokens += [runner.step()[0] for _ in range(2)]
    assert tokens == want


def test_rows_that_move_take_everything_along() -> None:
    runner = Runner()
    rows = [(0, PROMPT, [1, 2, 3]), (1, [8], [4, 5]), (2, [3, 3, 3], [6, 7])]
    got = [runner.step(**adding(*rows)), runner.step()]
    got += [runner.step(removed=[0]), runner.step(**adding((5, [4, 4], [2, 1])))]
    got.append(runner.step(removed=[1]))
    assert [t[2] for t in got] == alone([3, 3, 3], 5)
    assert [t[5] for t in got if 5 in t] == alone([4, 4], 2)


def test_blocks_are_appended_as_they_are_needed() -> None:
    runner = Runner()
    got = [runner.step(**adding((0, [1, 2, 3], [12])))[0], runner.step()[0]]
    got.append(runner.step(**appending(0, 0, [3]))[0])
    got += [runner.step()[0] for _ in range(3)]
    assert got == alone([1, 2, 3], 6)


def test_handles_are_told_only_when_they_change() -> None:
    runner = Runner()
    first = runner.result(**adding((0, PROMPT, [1, 2, 3]), (1, [8], [4, 5])))
    assert first.handles is not None and first.handles.tolist() == [0, 1]
    assert runner.result().handles is None
    third = runner.result(removed=[0])
    assert third.handles is not None and third.handles.tolist() == [1]
    nothing = runner.result(removed=[1], **adding((2, PROMPT, [6, 7])) | {"counts": [(2, 3)]})
    assert nothing.tokens is None and nothing.handles is not None and nothing.handles.tolist() == []


def test_logprobs_come_with_their_rows() -> None:
    runner = Runner()
    fields = adding((0, PROMPT, [1, 2]), (1, [8], [4]))
    fields["new_requests"][1] = NewRequestData(1, "r1", 1, 1, 0, [1], SamplingParams(temperature=0.0, logprobs=2), 7)
    result = runner.result(**fields)
    assert result.logprobs is not None and (result.logprobs.rows, result.logprobs.width) == ([1], 3)
    assert result.logprob_token_ids is not None and result.tokens is not None
    assert result.logprob_token_ids.tolist()[:2] == [result.tokens[1]] * 2, "greedy: the sampled one is the best one"
    assert result.logprob_ranks is not None and result.logprob_ranks.tolist() == [1]


def test_a_row_that_is_not_finite_is_told_by_its_handle() -> None:
    runner = Runner()
    runner.step(**adding((4, PROMPT, [1, 2]), (9, [8], [4, 5])))
    for cache in runner.runner._kv_caches:
        cache[:, 1] = float("nan")
    result = runner.result()
    assert result.bad == [4]


GOOD = adding((7, [1, 2], [9]))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a handle that is not held is removed": ({"removed": [5]}, "handle 5 is not held"),
    "one is removed twice": ({"removed": [0, 0]}, "removed twice"),
    "parked": ({"parked": [5]}, "handle 5 is not held"),
    "unparked": ({"unparked": [5]}, "handle 5 is not held"),
    "blocks for nobody": (appending(5, 0, [9]), "handle 5 is not held"),
    "blocks of no group": (appending(0, 1, [9]), "group 1 does not exist"),
    "a block past the pool": (appending(0, 0, [NUM_BLOCKS]), "block id is not from 1 to 19"),
    "a negative block": (appending(0, 0, [-1]), "block id is not from 1"),
    "the null block": (appending(0, 0, [0]), "block id is not from 1"),
    "too many blocks": (appending(0, 0, list(range(8, 15))), "has 9 blocks, 8 are the most"),
    "a count for nobody": ({"counts": [(5, 2)]}, "handle 5 is not held"),
    "a count of none": ({"counts": [(0, 0)]}, "is to compute 0"),
    "a negative count": ({"counts": [(0, -1)]}, "is to compute -1"),
    "a count for a parked row": ({"parked": [1], "counts": [(1, 2)]}, "is parked"),
    "tokens that nobody knows": ({"counts": [(0, 2)]}, "nobody knows"),
    "nothing runs": ({"parked": [0, 1]}, "nothing runs"),
    "a handle that is held comes again": (adding((0, [1, 2], [9])), "is held already"),
    "more tokens than told": (GOOD | {"token_ids": np.array([1, 2, 3], np.int32)}, "tokens do not add up"),
    "fewer tokens than told": (GOOD | {"token_ids": np.array([1], np.int32)}, "tokens do not add up"),
    "no tokens": (GOOD | {"token_ids": None}, "tokens do not add up"),
    "more blocks than told": (GOOD | {"block_ids": np.array([9, 10], np.int32)}, "blocks do not add up"),
    "no blocks": (GOOD | {"block_ids": None}, "blocks do not add up"),
    "a new row in the null block": (adding((7, [1, 2], [0])), "block id is not from 1"),
    "a new row past the pool": (adding((7, [1, 2], [NUM_BLOCKS])), "block id is not from 1"),
    "a new row without a block": (adding((7, [1, 2], [])), "no block"),
    "a new row with too few blocks": (adding((7, [1, 2, 3, 4, 5], [9])), "no block"),
    "a new row with all computed": (adding((7, [1, 2], [9]), computed=2), "2 tokens computed"),
    "a new row too long": (adding((7, [1] * 33, [9])), "length is wrong"),
    "too many rows": (adding((7, [1], [9]), (8, [1], [10])), "do not fit 3 rows"),
}


@pytest.mark.parametrize(("fields", "told"), REFUSED.values(), ids=REFUSED)
def test_a_step_that_does_not_fit_is_refused(fields: dict[str, Any], told: str) -> None:
    runner = Runner()
    runner.step(**adding((0, PROMPT, [1, 2]), (1, [8], [4])))
    with pytest.raises(StepRefused, match=told):
        runner.step(**fields)


def test_a_row_that_runs_out_of_blocks_is_refused() -> None:
    runner = Runner()
    runner.step(**adding((0, [1, 2, 3, 4], [9])))
    with pytest.raises(StepRefused, match="no block"):
        runner.step()


def test_blocks_for_a_wrong_number_of_groups_are_refused() -> None:
    new = NewRequestData(7, "r", 2, 2, 0, [1, 1], SamplingParams(), 0)
    with pytest.raises(StepRefused, match="blocks for 2 groups"):
        Runner().step(**GOOD | {"new_requests": [new], "block_ids": np.array([9, 10], np.int32)})


@pytest.mark.parametrize("step", [0, 1, 3, 9, -1])
def test_a_gap_in_the_steps_is_refused(step: int) -> None:
    runner = Runner()
    runner.step(**adding((0, PROMPT, [1, 2])))
    with pytest.raises(StepRefused, match=f"step {step} after step 1"):
        runner.runner.execute(SchedulerOutput(step))
