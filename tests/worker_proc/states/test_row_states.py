"""Slots of recurrent states in diffs, and the calls by which a step advances them. The model need not have states."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from host_pages import SMALL, Pool, host_memory, move
from runner_steps import CONFIG, MODEL, adding
from staged_pool import SlowDevice

from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.kv_layout import StateTensor, kv_layout
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.startup.setup import make_runner
from quire.worker_proc.states.pool import StatePool
from quire.worker_proc.states.rows import RowStates
from quire.worker_proc.transfers.mover import BlockMover
from quire.worker_proc.transfers.staged import StagedMover
from quire.worker_proc.transfers.state_parts import StateParts

TENSORS = [StateTensor("0", "conv 0", (3, 2), "bfloat16"), StateTensor("0", "recurrent 0", (5,), "float32")]
NUM_SLOTS, DRAFTS = 7, 2


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def make() -> ModelRunner:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=4)
    made = make_runner(config, kv_layout(MODEL, 4, "float32"), progress=False)[0]
    layout = msgspec.structs.replace(made.kv_layout, states=TENSORS)
    drafting = msgspec.structs.replace(config, num_speculative_tokens=DRAFTS)
    model, backend = made.forward.model, made.forward.backend
    runner = ModelRunner(config, layout, made.num_blocks, model, backend, torch.device("cpu"), num_slots=NUM_SLOTS)
    runner.states.__init__(drafting, layout, NUM_SLOTS, runner.batch, runner._transfer, torch.device("cpu"))  # type: ignore[misc]
    return runner


@pytest.fixture
def held() -> ModelRunner:
    """Request 0 has slot 3, request 1 slot 1."""
    runner = make()
    rows = adding((0, [5, 9], [1]), (1, [3, 4], [2]))
    runner.execute(SchedulerOutput(1, **rows, state_slots=ints(3, 1), blocks_to_zero=[3, 1])).result()
    runner.check()
    return runner


GOOD: dict[str, Any] = {"state_slots": ints(2), "blocks_to_zero": [2], "state_copies": [(3, 5)]}
NEW = adding((2, [8, 6], [5]))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no slot": ({"state_slots": None}, "1 new requests have 0 slots"),
    "two slots": ({"state_slots": ints(2, 4)}, "1 new requests have 2 slots"),
    "slot 0": ({"state_slots": ints(0)}, "between 1 and 6 (got 0)"),
    "a slot past the pool": ({"state_slots": ints(7)}, "between 1 and 6 (got 7)"),
    "a slot to zero past the pool": ({"blocks_to_zero": [2, 9]}, "got 9"),
    "a negative source": ({"state_copies": [(-1, 5)]}, "got -1"),
    "a target of 2**63": ({"state_copies": [(1, 2**63)]}, f"got {2**63}"),
    "the slot of a row that stays": ({"state_slots": ints(1), "blocks_to_zero": [1]}, "have the same slot 1"),
    "a copy over a row that stays": ({"state_copies": [(5, 3)]}, "state of handle 0 in slot 3 would be overwritten"),
    "zeros of a row that stays": ({"blocks_to_zero": [2, 3]}, "slot 3 to zero is not that of a new request"),
    "zeros of no row": ({"blocks_to_zero": [2, 6]}, "slot 6 to zero is not that of a new request"),
    "a slot that is not zeroed": ({"blocks_to_zero": []}, "slot 2 of handle 2 with 0 computed tokens must be zeroed"),
    "a state that is zeroed": (adding((2, [8, 6, 1, 1, 7], [5, 6]), computed=4), "must not be zeroed"),
}


def test_invalid_slots_are_refused_whole(held: ModelRunner) -> None:
    before = [held.states.slots.copy(), *(tensor.clone() for tensor in held.states.pool.tensors)]  # type: ignore[union-attr]
    for case, (fields, message) in WRONG.items():
        with pytest.raises(StepRefused) as refused:
            held.launch(SchedulerOutput(2, **NEW | GOOD | fields))
        assert message in str(refused.value), case
        after = [held.states.slots, *held.states.pool.tensors]  # type: ignore[union-attr]
        assert all(np.array_equal(a.tolist(), b.tolist()) for a, b in zip(before, after, strict=True)), case
    held.execute(SchedulerOutput(2, **NEW | GOOD)).result()
    held.check()


def test_a_forked_row_computes_after_its_copy(held: ModelRunner) -> None:
    """Its slot may be written once, by the step that gives it the state of its parent."""
    forked = adding((2, [5, 9, 2], [6]), computed=3) | {"counts": []}
    held.execute(SchedulerOutput(2, **forked, forks=[(2, 0)], state_slots=ints(4))).result()
    with pytest.raises(StepRefused, match="handle 2 with 3 computed tokens must be copied to"):
        held.launch(SchedulerOutput(3, parked=[1]))
    held.execute(SchedulerOutput(3, state_copies=[(3, 4)], parked=[1])).result()
    with pytest.raises(StepRefused, match="state of handle 2 in slot 4 would be overwritten"):
        held.launch(SchedulerOutput(4, state_copies=[(3, 4)]))


def test_copies_run_in_order() -> None:
    """Slot 3 gets the first content of slot 1, which then changes."""
    pool = StatePool(TENSORS, 5, torch.device("cpu"))
    for tensor in pool.tensors:
        tensor.copy_(torch.arange(5).view(5, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    pool.copy([(1, 2), (2, 3), (4, 1), (4, 2)])
    pool.zero([4])
    for tensor in pool.tensors:
        assert tensor.flatten(1)[:, -1].tolist() == [0, 4, 4, 1, 0]


@pytest.mark.parametrize("staged", [False, True])
def test_parts_of_slots_are_moved_from_where_their_states_are(staged: bool, held: ModelRunner) -> None:
    """Drafts were accepted, so that states lie at other places than their slots."""
    layout = msgspec.structs.replace(SMALL, states=[StateTensor("0", "recurrent 0", (513,), "float32")])
    states = RowStates(CONFIG, layout, NUM_SLOTS, held.batch, held._transfer, torch.device("cpu"))
    states.place[1:6] = [3, 2, 1, 5, 4]
    assert states.pool is not None and layout.num_state_parts == 5
    (tensor,) = states.pool.tensors
    tensor.copy_(torch.randn(tensor.shape))
    pool, parts = Pool(layout, load_native()), StateParts(layout, states, ())
    if staged:
        pool.mover = StagedMover(pool.native, SlowDevice(pool, parts), pool.watcher.wake, parts=parts)  # type: ignore[assignment]
    else:
        groups = [*pool.groups, *parts.groups()]
        pool.mover = BlockMover(pool.native, groups, pool.num_blocks, pool.watcher.wake, parts=parts)
    of_moves, pages = np.arange(6, dtype=np.int32), range(1, 7)
    with host_memory(9, pool.mover.page_bytes) as memory:
        pool.mover.map(memory.message)
        assert not pool.run(move(False, [2, 3, 3, 3, 3, 3], pages, groups=of_moves)).failed
        assert not pool.run(move(True, [4, 5, 5, 5, 5, 5], pages, groups=of_moves)).failed
        assert tensor[4].tolist() == tensor[1].tolist() and pool.block(4) == pool.block(2)
        memory.data(3)[0] ^= 1
        assert pool.run(move(True, [4, 6, 6, 6, 6, 6], pages, groups=of_moves)).failed == [2]
        # Pages of other parts of the same state are other contents.
        assert pool.run(move(True, [6], [5], groups=ints(5))).failed == [0]
        for slot, group in ((NUM_SLOTS, 1), (1, 6)):
            with pytest.raises(StepRefused, match="allowed are"):
                pool.mover.submit(move(False, [slot], [1], groups=ints(group)))
        pool.mover.close()


def test_calls_of_a_step(held: ModelRunner) -> None:
    """A chunk ends its first call at the grid; rows of one token are together; drafts go to places of their own."""
    states = held.states
    states.slots[:3] = [3, 1, 2]
    lens = np.array([40, 3, 1], np.int32)
    owners, none = np.repeat([0, 1, 2], lens), np.zeros(0, np.int64)
    inputs = StepInputs(
        np.arange(3),
        lens,
        np.array([70, 13, 9], np.int32),
        owners,
        none,
        np.array([1, 2]),
        np.array([1, 2]),
        [[7, 7], []],
    )

    def shown(at: Any) -> list[int]:
        return list(range(at.start, at.stop)) if isinstance(at, slice) else at.tolist()

    def run() -> list[tuple[Any, ...]]:
        calls = states.of_step(inputs).calls
        return [(shown(c.tokens), shown(c.source), shown(c.target), c.is_segment) for c in calls]

    both = [40, 43], [1, 2], [1, 2], False
    first = [(list(range(34)), [3], [3], True), (list(range(34, 40)), [3], [3], True)]
    assert run() == [*first, both, ([41], [1], [9], False), ([42], [9], [10], False)]
    states.accept(np.array([1, 2]), np.array([3, 1]))
    both = [40, 43], [10, 2], [10, 2], False
    assert run() == [*first, both, ([41], [10], [9], False), ([42], [9], [1], False)]
    states._one_by_one = True
    single = run()
    assert all(len(tokens) == 1 for tokens, *_ in single) and len(single) == 44
