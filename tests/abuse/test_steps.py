"""Well-formed but wrong steps: a worker refuses the whole step with a reason, and its state is unchanged.

The state is compared, and the valid step afterwards must return the same tokens.
"""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from runner_steps import CONFIG, MODEL, NUM_BLOCKS, adding, appending
from tiers import thinned

from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.startup.setup import make_runner

WINDOWED = msgspec.structs.replace(MODEL, windows=[8, 0])
BIG = 2**40
GREEDY = SamplingParams(temperature=0.0)


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


class Held:
    """A worker with three requests: 0 at the end of a block, 1 within a block, 2 parked. They hold blocks 1 to 6.

    The first block of request 1 is a prefix cache hit, which is only read.
    """

    def __init__(self) -> None:
        config = msgspec.structs.replace(CONFIG, max_num_seqs=4, max_num_batched_tokens=48)
        self.runner: ModelRunner = make_runner(config, kv_layout(MODEL, 4, "float32"), progress=False)[0]
        first = adding((0, [5, 9, 2, 7], [1]), (2, [3], [2]))
        self.runner.execute(SchedulerOutput(1, **first)).result()
        second = adding((1, [5, 9, 2, 7, 1], [1, 4]), computed=4)
        self.tokens = (
            self.runner.execute(SchedulerOutput(2, parked=[2], **second | appending(0, 0, [3]))).result().tokens
        )

    def good(self) -> SchedulerOutput:
        """Return a valid step to damage: request 3 is new, 2 is unparked, 1 is removed."""
        return SchedulerOutput(
            3,
            removed=[1],
            unparked=[2],
            counts=[(3, 5)],
            **{k: v for k, v in adding((3, [8, 6, 4, 1, 2], [5, 6])).items() if k != "counts"},
        )

    def state(self) -> list[Any]:
        batch, tables = self.runner.batch, self.runner.tables
        columns = [store.data.copy() for store in batch._stores if isinstance(getattr(store, "data", None), np.ndarray)]
        owners = tables._owners
        assert owners is not None and columns
        return [
            batch.num_rows,
            dict(batch.row_of),
            batch.generation,
            self.runner._step,
            *columns,
            *(t._ids.copy() for t in tables.tables),
            *(t.num_blocks_per_row.copy() for t in tables.tables),
            owners._owner.copy(),
            owners._readers.copy(),
            owners._row_of_place.copy(),
        ]

    def run(self, step: SchedulerOutput) -> dict[int, int]:
        """Execute a step; return tokens by handle."""
        result = self.runner.execute(step).result()
        self.runner.check()
        assert result.tokens is not None
        handles = self.runner.batch.handles[: self.runner.batch.num_rows]
        return dict(zip(handles.tolist(), result.tokens.tolist(), strict=True))

    def refuses(self, step: SchedulerOutput) -> str:
        """Check that the step is refused and the state unchanged; return the reason."""
        before = self.state()
        with pytest.raises(StepRefused) as caught:
            self.runner.launch(step)
        assert all(np.array_equal(a, b) for a, b in zip(before, self.state(), strict=True)), "state has changed"
        return str(caught.value)


def new(**fields: Any) -> NewRequestData:
    wanted = {
        "handle": 3, "request_id": "r3", "num_prompt_tokens": 5, "num_tokens": 5, "num_computed_tokens": 0,
        "num_blocks": [2], "sampling": GREEDY, "seed": 7,
    }  # fmt: skip
    return NewRequestData(**wanted | fields)


def more(handles: list[int], ids: list[int], groups: list[int] | None = None) -> dict[str, Any]:
    return {
        "appended_handles": ints(*handles),
        "appended_block_ids": ints(*ids),
        "appended_groups": None if groups is None else ints(*groups),
    }


INVALID_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    # blocks
    "a block at the pool's end": (more([0], [NUM_BLOCKS]), "block id"),
    "a block far beyond the pool": (more([0], [2**31 - 1]), "block id"),
    "a negative block": (more([0], [-1]), "block id"),
    "the lowest number as a block": (more([0], [-(2**31)]), "block id"),
    "the null block to write to": (more([0], [0]), "block id"),
    "a new request's block at the pool's end": ({"block_ids": ints(5, NUM_BLOCKS)}, "block id"),
    "a new request's negative block": ({"block_ids": ints(-5, 6)}, "block id"),
    "a new request on the null block": ({"block_ids": ints(5, 0)}, "block id"),
    "another's block": (more([0], [2]), "slot overlap"),
    "another's block for a new request": ({"block_ids": ints(3, 6)}, "slot overlap"),
    "a block that another request reads": ({"removed": [], "block_ids": ints(1, 6)}, "slot overlap"),
    "one's own block again": (more([0], [3]), "slot overlap"),
    "a block for two": (more([0, 2], [7, 7]), "slot overlap"),
    "a block twice for one": (more([0, 0], [7, 7]), "slot overlap"),
    "a block twice for a new request": ({"block_ids": ints(5, 5)}, "slot overlap"),
    "a block for a new request and an old one": (more([0], [5]), "slot overlap"),
    "more blocks than a table has room for": (more([0] * 7, list(range(7, 14))), "more than the maximum of 8"),
    "blocks for an unknown handle": (more([9], [7]), "not held"),
    "blocks for a removed request": (more([1], [7]), "not held"),
    "blocks for a negative handle": (more([-1], [7]), "not held"),
    "blocks of an unknown group": (more([0], [7], [1]), "got 1"),
    "blocks of a negative group": (more([0], [7], [-1]), "got -1"),
    "more handles than blocks": (more([0, 2], [7]), "different lengths"),
    "more blocks than handles": (more([0], [7, 8]), "different lengths"),
    "more groups than blocks": (more([0], [7], [0, 0]), "different lengths"),
    "blocks without handles": ({"appended_block_ids": ints(7)}, "different lengths"),
    "handles without blocks": ({"appended_handles": ints(0)}, "different lengths"),
    "groups without blocks": ({"appended_groups": ints(0)}, "different lengths"),
    "too few blocks for a new request": ({"new_requests": [new(num_blocks=[1])], "block_ids": ints(5)}, "no block"),
    "no blocks for a new request": ({"new_requests": [new(num_blocks=[0])], "block_ids": None}, "no block"),
    "fewer blocks than counted": ({"block_ids": ints(5)}, "number of block ids"),
    "more blocks than counted": ({"block_ids": ints(5, 6, 7)}, "number of block ids"),
    "blocks for no group": ({"new_requests": [new(num_blocks=[])]}, "0 KV groups"),
    "blocks for two groups": ({"new_requests": [new(num_blocks=[1, 1])]}, "2 KV groups"),
    "a negative number of blocks": ({"new_requests": [new(num_blocks=[-2])]}, "-2 blocks in KV group 0"),
    "a huge number of blocks": ({"new_requests": [new(num_blocks=[BIG])]}, "number of block ids"),
    # handles
    "an unknown handle is removed": ({"removed": [9]}, "not held"),
    "a request is removed twice": ({"removed": [1, 1]}, "duplicate handle"),
    "a negative handle is removed": ({"removed": [-1]}, "not held"),
    "a huge handle is removed": ({"removed": [2**63]}, "not held"),
    "an unknown handle is parked": ({"parked": [9]}, "not held"),
    "a parked request is parked": ({"parked": [2], "unparked": []}, "already parked"),
    "a request is parked twice": ({"parked": [0, 0]}, "already parked"),
    "a removed request is parked": ({"parked": [1]}, "is removed by this step"),
    "an unknown handle is unparked": ({"unparked": [9]}, "not held"),
    "a running request is unparked": ({"unparked": [0]}, "not parked"),
    "a request is unparked twice": ({"unparked": [2, 2]}, "not parked"),
    "a removed request is unparked": ({"unparked": [1]}, "not held"),
    "a new request is unparked": ({"unparked": [3]}, "not parked"),
    "an adapter in no slot": ({"new_requests": [new(adapter=1)]}, "adapter 1, which is in no slot"),
    "a negative adapter": ({"new_requests": [new(adapter=-1)]}, "adapter -1, which is in no slot"),
    "a huge adapter": ({"new_requests": [new(adapter=BIG)]}, f"adapter {BIG}, which is in no slot"),
    "a new held handle": ({"new_requests": [new(handle=0)], "counts": []}, "is in use"),
    "a new negative handle": ({"new_requests": [new(handle=-3)], "counts": [(-3, 5)]}, "got -3"),
    "a new huge handle": ({"new_requests": [new(handle=BIG)], "counts": [(BIG, 5)]}, f"got {BIG}"),
    "a new request twice": (
        {"new_requests": [new(), new()], "token_ids": ints(*[1] * 10), "block_ids": ints(5, 6, 7, 8)},
        "duplicate handle",
    ),
    "more requests than rows": (
        {
            "removed": [],
            "new_requests": [new(), new(handle=4)],
            "token_ids": ints(*[1] * 10),
            "block_ids": ints(5, 6, 7, 8),
        },
        "do not fit in 4 rows",
    ),
    # lengths
    "no tokens": ({"token_ids": None}, "number of token ids"),
    "too few tokens": ({"token_ids": ints(8, 6, 4, 1)}, "number of token ids"),
    "too many tokens": ({"token_ids": ints(8, 6, 4, 1, 2, 2)}, "number of token ids"),
    "tokens without a request": ({"new_requests": [], "block_ids": None, "counts": []}, "number of token ids"),
    "a token past the vocabulary": ({"token_ids": ints(8, 6, 4, 1, MODEL.vocab_size)}, "vocabulary"),
    "a negative token": ({"token_ids": ints(-1, 6, 4, 1, 2)}, "vocabulary"),
    "a request of no tokens": ({"new_requests": [new(num_tokens=0)], "token_ids": None}, "length must be between"),
    "a request of -5 tokens": ({"new_requests": [new(num_tokens=-5)]}, "length must be between"),
    "a request of a huge length": ({"new_requests": [new(num_tokens=BIG)]}, "length must be between"),
    "a prompt of 0 tokens": ({"new_requests": [new(num_prompt_tokens=0)]}, "0 prompt tokens"),
    "a prompt of -1 tokens": ({"new_requests": [new(num_prompt_tokens=-1)]}, "-1 prompt tokens"),
    "a prompt longer than the request": ({"new_requests": [new(num_prompt_tokens=6)]}, "6 prompt tokens"),
    "all computed": ({"new_requests": [new(num_computed_tokens=5)]}, "5 computed tokens"),
    "-1 computed tokens": ({"new_requests": [new(num_computed_tokens=-1)]}, "-1 computed tokens"),
    "computed beyond its blocks": (
        {"new_requests": [new(num_computed_tokens=4, num_blocks=[1])], "block_ids": ints(5), "counts": []},
        "no block",
    ),
    "a seed of 65 bits": ({"new_requests": [new(seed=2**64)]}, "seed"),
    "a negative seed": ({"new_requests": [new(seed=-1)]}, "seed"),
    "a bias past the vocabulary": (
        {"new_requests": [new(sampling=SamplingParams(logit_bias={MODEL.vocab_size: 1.0}))]},
        "logit_bias",
    ),
    "a stop past the vocabulary": (
        {"new_requests": [new(sampling=SamplingParams(stop_token_ids=[2**31 - 1]))]},
        "stop_token_ids",
    ),
    "allowed tokens past the vocabulary": (
        {"new_requests": [new(sampling=SamplingParams(allowed_token_ids=[1, 999]))]},
        "allowed_token_ids",
    ),
    "bad words past the vocabulary": (
        {"new_requests": [new(sampling=SamplingParams(bad_words_token_ids=[[1, 2], [3, 999]]))]},
        "bad_words_token_ids",
    ),
    # counts
    "a count for an unknown handle": ({"counts": [(3, 5), (9, 2)]}, "not held"),
    "a count for a removed request": ({"counts": [(3, 5), (1, 1)]}, "not held"),
    "a count of 0": ({"counts": [(3, 0)]}, "got 0"),
    "a negative count": ({"counts": [(3, -5)]}, "got -5"),
    "a huge count": ({"counts": [(3, BIG)]}, f"got {BIG}"),
    "a count of 2**63": ({"counts": [(3, 2**63)]}, f"got {2**63}"),
    "a count twice": ({"counts": [(3, 5), (3, 1)]}, "duplicate handle"),
    "more than the known tokens": ({"counts": [(3, 6)]}, "are known"),
    "more than the known tokens of a running request": ({"counts": [(3, 5), (0, 2)]}, "are known"),
    "a count for a parked request": ({"unparked": [], "counts": [(3, 5), (2, 1)]}, "is parked"),
    "more drafts than tokens": ({"drafts": [(3, 5)]}, "draft tokens among 5"),
    "drafts of a request without a count": ({"drafts": [(0, 1)]}, "draft tokens among 1"),
    "no drafts": ({"drafts": [(3, 0)]}, "cannot have 0 draft tokens"),
    "negative drafts": ({"drafts": [(3, -1)]}, "cannot have -1 draft tokens"),
    "drafts before the end": ({"drafts": [(3, 2)]}, "cannot have 2 draft tokens"),
    "drafts for an unknown handle": ({"drafts": [(9, 1)]}, "not held"),
    "drafts twice": ({"drafts": [(3, 1), (3, 1)]}, "duplicate handle"),
    "no running request": (
        {"removed": [0, 1, 2], "unparked": [], "new_requests": [], "token_ids": None, "block_ids": None, "counts": []},
        "without running requests",
    ),
    "a copy out of range": ({"block_copies": [(1, 2**20)]}, "must be between 1 and"),
    "a fork of an unknown handle": ({"forks": [(4, 9)]}, "not held"),
    # reserved
    "drafts of the scheduler's": ({"draft_token_ids": ints(1)}, "does not support"),
    # states, which this model does not keep
    "slots to zero": ({"blocks_to_zero": [1]}, "keeps no such states"),
    "slots to copy": ({"state_copies": [(1, 2)]}, "keeps no such states"),
    "slots of new requests": ({"state_slots": ints(1)}, "keeps no such states"),
    # numbers
    "a step left out": ({"step": 4}, "step 4 after step 2"),
    "a step again": ({"step": 2}, "step 2 after step 2"),
    "an earlier step": ({"step": 1}, "step 1 after step 2"),
    "a negative step": ({"step": -3}, "step -3 after step 2"),
    "a huge step": ({"step": 2**63}, "after step 2"),
}


def test_invalid_steps_are_refused_whole() -> None:
    """The valid step after all of them has the same tokens as on an undisturbed worker."""
    held, undisturbed = Held(), Held()
    for case, (fields, message) in INVALID_STEPS.items():
        assert message in held.refuses(msgspec.structs.replace(held.good(), **fields)), case
    right = undisturbed.run(undisturbed.good())
    assert held.run(held.good()) == right
    assert set(right) == {0, 2, 3}


def test_too_many_tokens_for_one_step() -> None:
    """Each request alone would fit; the memory plan has room for 48 tokens per step."""
    held = Held()
    rows = {"new_requests": [new(handle=3 + i, num_tokens=30, num_blocks=[8]) for i in range(2)]}
    step = SchedulerOutput(
        3, removed=[1, 2], **rows, token_ids=ints(*[1] * 60), block_ids=ints(*range(4, 20)), counts=[(3, 30), (4, 30)]
    )
    assert "exceeds the maximum of 48" in held.refuses(step)


def test_row_without_a_slot_is_refused() -> None:
    """The diff does not name the row: request 0 keeps decoding without one until it needs a block."""
    held = Held()
    for step in (3, 4, 5):
        held.runner.execute(SchedulerOutput(step, removed=[1, 2] if step == 3 else [])).result()
    before = held.state()
    with pytest.raises(StepRefused, match="no block"):
        held.runner.launch(SchedulerOutput(6))
    after = held.state()
    assert all(np.array_equal(a, b) for i, (a, b) in enumerate(zip(before, after, strict=True)) if i != 3)


def test_null_blocks_only_before_the_window() -> None:
    def runner() -> ModelRunner:
        config = msgspec.structs.replace(CONFIG, model=WINDOWED)
        return make_runner(config, kv_layout(WINDOWED, 4, "float32"), progress=False)[0]

    def step(*ids: int, computed: int = 12) -> SchedulerOutput:
        coming = new(num_tokens=14, num_prompt_tokens=14, num_computed_tokens=computed, num_blocks=[4, 4])
        counts = [(3, 14 - computed)]
        return SchedulerOutput(
            1, new_requests=[coming], token_ids=ints(*range(14)), block_ids=ints(*ids), counts=counts
        )

    kinds = [group.kind for group in kv_layout(WINDOWED, 4, "float32").groups]
    assert sorted(kinds) == ["full_attention", "sliding_window"]
    windowed, whole = [0, 9, 10, 11], [1, 2, 3, 4]
    null_in_front = windowed + whole if kinds[0] == "sliding_window" else whole + windowed
    runner().execute(step(*null_in_front))
    for place in range(8):
        ids = [*range(1, 9)]
        ids[place] = 0
        in_window = (place < 4) == (kinds[0] == "sliding_window")
        if in_window and place % 4 < 3:
            continue  # not written
        with pytest.raises(StepRefused, match="block"):
            runner().launch(step(*ids))


NUMBERS = [-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, NUM_BLOCKS - 1, NUM_BLOCKS, 61, 1000, 2**31 - 1]


def _mutate(step: SchedulerOutput, rng: random.Random) -> SchedulerOutput:
    """Return the step with one value changed, deleted, duplicated or moved."""

    def other(value: Any) -> Any:
        match value:
            case bool():
                return value
            case int():
                return rng.choice([*NUMBERS, value + 1, value - 1])
            case np.ndarray():
                return ints(*others(value.tolist())) if rng.random() < 0.9 else None
            case tuple():
                return tuple(others(list(value), keep=True))
            case list():
                return others(value)
            case NewRequestData():
                name = rng.choice([f for f in value.__struct_fields__ if f not in ("sampling", "request_id", "seed")])
                return msgspec.structs.replace(value, **{name: other(getattr(value, name))})
            case _:
                return value

    def others(values: list[Any], *, keep: bool = False) -> list[Any]:
        what = 0 if keep else rng.randrange(4)
        at = rng.randrange(len(values)) if values else 0
        if what == 0 and values:
            return [*values[:at], other(values[at]), *values[at + 1 :]]
        if what == 1 and values:
            return values[:at] + values[at + 1 :]
        if what == 2 and values:
            return [*values[: at + 1], values[at], *values[at + 1 :]]
        return values[::-1]

    values = {name: getattr(step, name) for name in step.__struct_fields__}
    fields = [name for name, value in values.items() if isinstance(value, np.ndarray) or value]
    name = rng.choice(fields)
    return msgspec.structs.replace(step, **{name: other(values[name])})


def _everything(held: Held) -> SchedulerOutput:
    return msgspec.structs.replace(held.good(), **more([0, 2], [7, 8], [0, 0]))


@pytest.mark.parametrize("seed", thinned(range(2), keep=1))
def test_random_damage_is_refused_whole_or_runs(seed: int) -> None:
    """No other exception, no partially applied step; a step that runs keeps all invariants."""
    rng = random.Random(seed)
    held, num_refused, num_run = Held(), 0, 0
    for _ in range(150):
        step = _everything(held)
        for _ in range(rng.randint(1, 3)):
            step = _mutate(step, rng)
        before = held.state()
        try:
            held.runner.execute(step).result()
        except StepRefused as refused:
            assert str(refused) and "\n" not in str(refused)
            assert all(np.array_equal(a, b) for a, b in zip(before, held.state(), strict=True)), step
            num_refused += 1
        else:
            held.runner.check()
            held, num_run = Held(), num_run + 1
    assert num_refused > 50 and num_run


def test_steady_step_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost follows change: a steady step has no checks, for any number of requests."""
    held = Held()
    held.run(held.good())

    def unwanted(*args: Any) -> None:
        raise AssertionError("a steady step is checked")

    looked: Callable[..., None] = unwanted
    monkeypatch.setattr("quire.worker_proc.batch.diff_check.After", looked)
    held.run(SchedulerOutput(4))


APPENDS: dict[str, tuple[dict[str, Any], str]] = {
    "right ones": (more([0], [7]), ""),
    "right ones in a group": (more([0], [7], [0]), ""),
    "for a parked one": (more([2], [7]), ""),
    "several": (more([0, 1, 0], [7, 8, 9]), ""),
    "nothing": (more([], []), ""),
    "another's": (more([0], [4]), "slot overlap"),
    "one that is read": (more([0], [1]), "slot overlap"),
    "twice": (more([0, 1], [7, 7]), "slot overlap"),
    "the null block": (more([0], [0]), "block id"),
    "a negative one": (more([0], [-7]), "block id"),
    "past the pool": (more([0], [NUM_BLOCKS]), "block id"),
    "too many": (more([0] * 7, list(range(7, 14))), "more than the maximum of 8"),
    "for nobody": (more([9], [7]), "not held"),
    "for a negative handle": (more([-2], [7]), "not held"),
    "of no group": (more([0], [7], [1]), "got 1"),
    "of a negative group": (more([0], [7], [-1]), "got -1"),
    "fewer handles": (more([0], [7, 8]), "different lengths"),
    "fewer blocks": (more([0, 1], [7]), "different lengths"),
    "fewer groups": (more([0, 1], [7, 8], [0]), "different lengths"),
    "handles alone": ({"appended_handles": ints(0)}, "different lengths"),
}


def test_step_with_only_new_blocks() -> None:
    """The most frequent kind of step has a short path, which must find the same errors."""
    held = Held()
    for case, (fields, message) in APPENDS.items():
        step = SchedulerOutput(3, **fields)
        if message:
            assert message in held.refuses(step), case
        else:
            Held().runner.execute(step).result()


def test_blocks_of_another_request_do_not_count() -> None:
    held = Held()
    for step in (3, 4, 5):
        held.runner.execute(SchedulerOutput(step)).result()
    assert "no block" in held.refuses(SchedulerOutput(6, **more([1], [7])))
    assert held.runner.execute(SchedulerOutput(6, **more([0, 1], [7, 8]))).result().tokens is not None
