"""Several ranks behind the interface of one worker: results are released only when all ranks agree."""

from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
from memory_channel import MemoryChannel, memory_pair

from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.model.checkpoint_digest import Fingerprint
from quire.protocol.wire.adapter_messages import AdapterLoaded
from quire.protocol.wire.item_messages import Encoded
from quire.protocol.wire.transfer_messages import BlocksMoved
from quire.protocol.wire.worker_messages import (
    Digest,
    MemoryPlan,
    ModelRunnerOutput,
    Proposed,
    Ready,
    SchedulerOutput,
    SchedulerToWorker,
    WorkerToScheduler,
)
from quire.scheduler_proc.process.worker_group import WorkerGroup

PLAN = MemoryPlan("cpu", 0, 0, 0, 0, 33, 4)


def _group(size: int) -> tuple[WorkerGroup, list[MemoryChannel]]:
    pairs = [memory_pair(WorkerToScheduler, SchedulerToWorker) for _ in range(size)]
    return WorkerGroup([near for near, _ in pairs]), [far for _, far in pairs]


def _result(step: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(step, np.array([7], np.int32), np.array([1], np.int32))


def test_sends_the_same_step_to_every_rank() -> None:
    group, ranks = _group(3)
    group.send(SchedulerOutput(1, removed=[4]))
    for rank in ranks:
        received = rank.receive()
        assert received is not None
        assert received.message.removed == [4]


def test_a_result_waits_for_the_slowest_rank() -> None:
    group, ranks = _group(2)
    ranks[0].send(_result(1))
    ranks[0].send(Digest(1, b"x" * 8))
    assert group.receive() is None
    ranks[0].send(_result(2))
    ranks[0].send(Digest(2, b"y" * 8))
    ranks[1].send(Digest(1, b"x" * 8))
    received = group.receive()
    assert received is not None
    assert received[1].message.step == 1
    assert group.receive() is None
    ranks[1].send(Digest(2, b"y" * 8))
    received = group.receive()
    assert received is not None
    assert received[1].message.step == 2


def test_disagreeing_ranks_raise() -> None:
    group, ranks = _group(2)
    ranks[0].send(_result(1))
    ranks[0].send(Digest(1, b"x" * 8))
    ranks[1].send(Digest(1, b"z" * 8))
    with pytest.raises(EngineError, match="the ranks disagree on step 1"):
        group.receive()


def test_a_copy_has_failed_where_it_failed_on_any_rank() -> None:
    """SGLang #26921, #28429, #30760, #22607: ranks that decided alone about a copy waited for each other."""
    group, ranks = _group(3)
    for rank, failed, seconds in ((2, [4], 0.1), (0, [1, 4], 0.3)):
        ranks[rank].send(BlocksMoved(7, failed, seconds, f"rank {rank}", seconds / 2))
    ranks[0].send(BlocksMoved(8))
    assert group.receive() is None
    ranks[1].send(BlocksMoved(7, [], 0.2))
    received = group.receive()
    assert received is not None
    assert received[1].message == BlocksMoved(7, [1, 4], 0.3, "rank 0", 0.15)
    assert group.receive() is None


def test_drafts_do_not_wait_for_digests() -> None:
    """The masks that every rank awaits depend on them."""
    group, ranks = _group(2)
    ranks[0].send(_result(1))
    one = np.array([1], np.int32)
    ranks[0].send(Proposed(2, one, one, one))
    received = group.receive()
    assert received is not None and isinstance(received[1].message, Proposed)
    assert group.receive() is None


def test_a_single_rank_needs_no_digest() -> None:
    group, ranks = _group(1)
    ranks[0].send(_result(1))
    assert group.receive() is not None


def test_ready_has_the_fewest_blocks_of_all_ranks() -> None:
    group, _ = _group(2)
    plans = [msgspec.structs.replace(PLAN, device=device) for device in ("L4", "A100", "A100, L4")]
    assert group.ready(1, Ready([40, 30], plans[1], {"load_s": 2.0})) is None
    ready = group.ready(0, Ready([20, 50], plans[0], {"load_s": 1.0}))
    assert ready == Ready([20, 30], plans[2], {"load_s": 2.0})


def test_a_rank_on_a_node_must_have_the_checkpoint_of_this_machine() -> None:
    """No Ready is received before that is known."""
    known: Future[Fingerprint] = Future()
    near, far = memory_pair(WorkerToScheduler, SchedulerToWorker)
    group = WorkerGroup([near], 1, known)
    far.send(Ready([20], PLAN, {}, files="d" * 32))
    assert group.receive() is None
    known.set_result(Fingerprint("d" * 32, "state of the files here"))
    received = group.receive()
    assert received is not None and group.ready(0, received[1].message) == Ready([20], PLAN, {})
    for files in ("e" * 32, "", "state of the files here"):
        with pytest.raises(ConfigError, match=r"rank 0 has loaded another model .*: copy the files"):
            WorkerGroup([near], 2, known).ready(0, Ready([20], PLAN, {}, files=files))


def test_ranks_with_different_block_sizes_are_an_error() -> None:
    group, _ = _group(2)
    group.ready(0, Ready([20], PLAN, {}))
    with pytest.raises(EngineError, match="the ranks chose different KV block sizes"):
        group.ready(1, Ready([20], msgspec.structs.replace(PLAN, block_size=256), {}))


def test_loads_and_encodings_are_answered_when_all_ranks_have_answered() -> None:
    group, ranks = _group(2)
    ranks[0].send(AdapterLoaded(4, 1, "", 100, 0.5, True))
    ranks[0].send(AdapterLoaded(5, 2, "", 100, 0.5))
    assert group.receive() is None
    ranks[1].send(AdapterLoaded(4, 1, "no memory", 100, 2.0))
    received = group.receive()
    assert received is not None and received[1].message == AdapterLoaded(4, 1, "no memory", 200, 2.0, False)
    for rank, answer in ((0, Encoded(b"a", "", 2.0)), (0, Encoded(b"b")), (1, Encoded(b"a", "no memory", 0.5))):
        ranks[rank].send(answer)
    received = group.receive()
    assert received is not None and received[1].message == Encoded(b"a", "no memory", 2.0)
    ranks[1].send(AdapterLoaded(6, 2))
    with pytest.raises(EngineError, match=r"different adapters to slot 2: numbers \[5, 6\]"):
        group.receive()
