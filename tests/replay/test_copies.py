"""Host memory in a simulation: the clock of copies, hits that it brings, late loads."""

import msgspec
import numpy as np
import pytest
from replay_workloads import AffineCost
from scheduler_driver import make_config, make_layout

from quire.bench.measure.shapes import SHAPES
from quire.kernels.cpu.pages.page_moves import BlockGroup
from quire.protocol.model.kv_layout import StateTensor, kv_layout
from quire.protocol.wire.transfer_messages import MoveBlocks, MoveKind
from quire.replay.costs.chips import find_chip
from quire.replay.costs.copies import NO_TIERS, CopyClock, CopyRates, Tiers, copy_rates, page_bytes
from quire.replay.costs.cost import ConstantCost, CostModel
from quire.replay.costs.roofline import Roofline
from quire.replay.report.page_data import page_data
from quire.replay.report.summary import summary, tables
from quire.replay.run.request_states import QueueHead, seconds_by_reason
from quire.replay.run.run_record import RunRecord
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.setup import Setup
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import OpenLoop
from quire.replay.workload.workload import Call, ContentIds
from quire.scheduler_proc.costs.choice import LOAD_LIMIT_S
from quire.worker_proc.transfers.pages import page_bytes_of

SECOND = CopyRates(1000.0, 500.0, 250.0, host_seconds=0.5, disk_seconds=1.0)
"""A page of 1,000 bytes per second, after half a second."""


def move(number: int, kind: MoveKind, count: int) -> MoveBlocks:
    ids = np.arange(1, count + 1, dtype=np.int32)
    return MoveBlocks(number, kind, ids, ids, ids.astype(np.int64), b"k" * count)


class TestClock:
    def test_loads_do_not_wait_for_stores_and_stores_wait_for_steps(self) -> None:
        clock = CopyClock(Tiers(10, 1000, SECOND))
        assert clock.send(move(1, MoveKind.STORE, 2), 1.0, 4.0) == 6.5
        assert clock.send(move(2, MoveKind.LOAD, 1), 1.0, 4.0) == 2.5
        assert clock.send(move(3, MoveKind.LOAD, 1), 2.0, 4.0) == 4.0
        assert clock.send(move(4, MoveKind.STORE, 1), 9.0, 4.0) == 10.5
        assert clock.take(2.4) is None
        answers = [clock.take(20.0) for _ in range(4)]
        assert [(a.transfer, a.seconds, a.failed) for a in answers if a] == [
            *((2, 1.5, []), (3, 1.5, []), (1, 2.5, []), (4, 1.5, [])),
        ]
        assert clock.next_end == float("inf")

    def test_each_tier_has_its_queues_and_all_ranks_share_the_disk(self) -> None:
        clock = CopyClock(Tiers(10, 1000, SECOND, 10, num_ranks=2))
        mixed = msgspec.structs.replace(move(1, MoveKind.LOAD, 2), page_ids=np.array([9, 10], np.int32))
        assert clock.send(mixed, 0.0, 4.0) == 5.0  # 1.5 s from host memory beside 5 s from disk
        assert clock.send(move(2, MoveKind.LOAD, 1), 0.0, 4.0) == 3.0
        demoted = msgspec.structs.replace(move(3, MoveKind.DEMOTE, 1), page_ids=np.array([11], np.int32))
        assert clock.send(demoted, 1.0, 4.0) == 10.0
        answers = [clock.take(20.0) for _ in range(3)]
        assert [(a.transfer, a.seconds, a.disk_seconds) for a in answers if a] == [
            *((2, 1.5, 0.0), (1, 6.5, 5.0), (3, 9.0, 9.0)),
        ]

    def test_rates_are_those_of_the_chip(self) -> None:
        fast, slow = (Roofline(SHAPES["llama-3.1-8b"], find_chip(name)) for name in ("h200", "l4"))
        assert copy_rates(fast).host == 51e9 and copy_rates(slow).host == 25e9
        assert copy_rates(ConstantCost(1)) == copy_rates(None) == CopyRates()

    @pytest.mark.parametrize("shape", ["llama-3.1-8b", "gemma-3-1b", "gpt-oss-20b"])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_page_is_as_large_as_a_worker_makes_it(self, shape: str, ranks: int) -> None:
        layout = kv_layout(SHAPES[shape], 16, "bfloat16")
        ranked = layout.of_rank(ranks)
        groups = []
        for group in ranked.groups:
            half = np.zeros((1, group.block_size * ranked.token_bytes(group) // 2), np.uint8)
            groups.append(BlockGroup([half] * (2 * len(group.layers)), b""))
        assert page_bytes(layout, ranks) == page_bytes_of(groups)


BLOCKS = 24
CONFIG = make_config(block_size=4, max_model_len=64, enable_chunked_prefill=False)


def turns(*arrivals: float, contents: int = 4) -> list[Call]:
    """Return a call at each time, by turns of some contents: a prompt of 9 blocks and one token, and 2 tokens."""
    return [
        Call(number, f"{number}", arrival, 37, 2, ContentIds(range(10), 4, number % contents))
        for number, arrival in enumerate(arrivals)
    ]


class SlowSteps(AffineCost):
    """Steps that take longer than copies, so that requests load."""

    def seconds(self, step: StepShape) -> float:
        return super().seconds(step) + step.num_tokens


SLOW = SlowSteps()


def simulated(calls: list[Call], tiers: Tiers, num_blocks: int = BLOCKS, *, cost: CostModel = SLOW) -> RunRecord:
    setup = Setup(CONFIG, make_layout(CONFIG), num_blocks, tiers=tiers)
    return Simulator(setup, cost, OpenLoop(calls), RunRecord(block_size=4)).run()


class TestSimulation:
    """The pool has room for two of four prompts, which are asked for by turns, 100 s apart."""

    CALLS = turns(*range(0, 600, 100))

    def test_evicted_prompts_are_loaded(self) -> None:
        record = simulated(self.CALLS, Tiers(41, 1000, CopyRates(10_000.0, host_seconds=0.5)))
        assert [run.num_cached_tokens for run in record.requests] == [0] * 4 + [36] * 2
        tier = record.tiers["host"]
        assert tier["hit_tokens"] == 4 * tier["num_loaded"] and 36 < tier["hit_tokens"] <= 72
        assert (tier["num_pages"], tier["num_late"], tier["num_failed"]) == (40, 0, 0)
        for run in record.requests[4:]:
            waited = run.scheduled - run.arrival
            blocks = (waited - 0.5) * 10
            assert 1 <= round(blocks) <= 9 and blocks == pytest.approx(round(blocks))
            assert [(moment.time, moment.reason) for moment in run.moments] == [(run.arrival, "loading")]
        first = record.requests[0]
        assert record.requests[4].end - record.requests[4].scheduled < first.end - first.scheduled

    def test_a_disk_keeps_what_host_memory_evicts(self) -> None:
        calls = turns(*range(0, 4800, 100), contents=24)
        record = simulated(calls, Tiers(81, 1000, CopyRates(1e6), 301), 100)
        host, disk = record.tiers["host"], record.tiers["disk"]
        assert host["num_evicted"] > 0 and disk["num_stored"] > 0
        without = simulated(calls, Tiers(81, 1000, CopyRates(1e6)), 100)
        assert sum(run.num_cached_tokens for run in record.requests) > without.tiers["host"]["hit_tokens"]
        assert disk["hit_tokens"] == 4 * disk["num_loaded"] > 0
        alone = simulated(calls, Tiers(0, 1000, CopyRates(1e6), 301), 100)
        assert alone.tiers.keys() == {"disk"} and alone.tiers["disk"]["hit_tokens"] > 0

    def test_states_are_loaded_with_the_blocks_before_them(self) -> None:
        """Prompts of 37 tokens, with states at position 32 in eight slots."""
        states = [StateTensor("0", "state 0", (300,), "float32")]
        layout = msgspec.structs.replace(make_layout(CONFIG), states=states, state_chunk=8)
        config = msgspec.structs.replace(CONFIG, state_slots=8, enable_chunked_prefill=True)
        setup = Setup(config, layout, BLOCKS, tiers=Tiers(400, 1000, CopyRates(1e6)))
        calls = turns(*range(0, 2800, 100), contents=14)
        record = Simulator(setup, SLOW, OpenLoop(calls), RunRecord(block_size=4)).run()
        assert layout.num_state_parts == 5
        assert [run.num_cached_tokens for run in record.requests] == [0] * 14 + [32] * 14

    def test_a_load_that_is_late_is_computed(self) -> None:
        record = simulated(self.CALLS, Tiers(41, 1000, CopyRates(1000.0, host_seconds=LOAD_LIMIT_S)), 32)
        tier = record.tiers["host"]
        assert (tier["num_late"], tier["hit_tokens"]) == (1, 36)
        late, last = record.requests[4:]
        assert late.scheduled - late.arrival >= LOAD_LIMIT_S and late.num_cached_tokens < 36
        assert last.num_cached_tokens == 36, "by now it is known that computing takes longer"

    def test_a_load_at_the_limit_is_not_late(self) -> None:
        fast = CopyRates(1e30, host_seconds=LOAD_LIMIT_S)
        assert simulated(self.CALLS, Tiers(41, 1000, fast)).tiers["host"]["num_late"] == 0

    def test_stores_in_flight_do_not_prolong_the_run(self) -> None:
        without = simulated(self.CALLS[:4], NO_TIERS)
        assert simulated(self.CALLS[:4], Tiers(41, 1000, CopyRates(1.0))).virtual_s == without.virtual_s

    def test_waiting_requests_do_not_wait_behind_a_load(self) -> None:
        calls = [*self.CALLS[:4], *turns(400.0), Call(5, "other", 400.0, 5, 2)]
        calls[4].number = 4
        record = simulated(calls, Tiers(41, 1000, CopyRates(1e9, host_seconds=3.0)), cost=AffineCost())
        assert record.requests[5].scheduled == 400.0 and record.requests[4].scheduled == pytest.approx(403.0)
        assert seconds_by_reason(record.requests[5], QueueHead(record.requests)).keys() <= {"prefill", "decode"}

    def test_tiers_are_in_the_reports(self) -> None:
        record = simulated(self.CALLS, Tiers(41, 1000, CopyRates(10_000.0)))
        found = summary(record)
        assert found["tiers"]["host"]["hit_tokens"] == record.tiers["host"]["hit_tokens"] > 0
        table = next(table.text() for table in tables(found) if table.title == "tier")
        assert table.splitlines()[1].split()[:2] == ["host", str(record.tiers["host"]["hit_tokens"])]
        assert page_data([record])["runs"][0]["facts"]["tiers"][0][0] == "host"
