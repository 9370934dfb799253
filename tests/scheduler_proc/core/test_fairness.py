"""Tenants take turns in the queue, and share rows, blocks and prefill tokens."""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import Driver, expected_tokens
from tiers import thinned
from waiting_request import waiting_request

from quire.scheduler_proc.features.tenants import equal_parts
from quire.scheduler_proc.kv.fair_pool import CHUNK
from quire.scheduler_proc.requests.reasons import PreemptReason
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.request_queue import OUTPUT_WEIGHT, RequestQueue

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])
MATRIX = product(["fcfs", "priority"], [True, False])
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


@dataclass
class PlainQueue:
    """A model of RequestQueue with O(n) operations and no caches."""

    policy: str
    waiting: list[Request] = field(default_factory=list)
    served: dict[int, int] = field(default_factory=dict)
    floor: int = 0

    def least(self) -> int:
        return max([self.floor, min((self.served[r.account] for r in self.waiting), default=0)])

    def add(self, request: Request) -> None:
        if all(r.account != request.account for r in self.waiting):
            self.served[request.account] = max(self.served.get(request.account, 0), self.floor)
        self.waiting.append(request)

    def own(self, request: Request) -> tuple[float, ...]:
        return (request.number,) if self.policy == "fcfs" else (request.priority, request.arrival, request.number)

    def next(self) -> Request:
        firsts = [
            min((r for r in self.waiting if r.account == tenant), key=self.own)
            for tenant in {r.account for r in self.waiting}
        ]
        return min(firsts, key=self.rank)

    def rank(self, first: Request) -> tuple[float, ...]:
        turn = first.turn if first.turn >= 0 else self.served[first.account]
        return (turn, first.number) if self.policy == "fcfs" else (first.priority, turn, first.arrival, first.number)

    def take(self, request: Request) -> None:
        self.floor = self.least()
        self.waiting.remove(request)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "take", "take", "remove", "put_back", "lose_place", "charge"]),
        st.integers(0, 3),
        st.integers(-1, 1),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["fcfs", "priority"]), OPERATIONS)
def test_queue_equals_a_plain_model(policy: str, operations: list[tuple[str, int, int, int]]) -> None:
    queue, plain = RequestQueue(policy), PlainQueue(policy)
    taken: list[Request] = []
    for number, (kind, tenant, priority, amount) in enumerate(operations):
        match kind:
            case "add":
                request = waiting_request(number, tenant, priority, float(amount))
                plain.add(request)
                queue.add_request(request)
            case "take" if plain.waiting:
                request = queue.peek_request()
                plain.take(request)
                queue.take_request(request)
                if request not in taken:
                    taken.append(request)
            case "remove" if plain.waiting:
                request = plain.waiting.pop(amount % len(plain.waiting))
                queue.remove_request(request)
            case "put_back" | "lose_place" if taken:
                request = taken.pop(amount % len(taken))
                if kind == "lose_place":
                    request.turn = -1
                plain.add(request)
                queue.add_request(request)
            case "charge":
                plain.served[tenant] = plain.served.get(tenant, 0) + amount
                queue.charge(tenant, amount)
        queue.check()
        assert len(queue) == len(plain.waiting)
        if plain.waiting:
            assert queue.peek_request() is plain.next()


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["fcfs", "priority"]), st.integers(0, 2), OPERATIONS)
def test_one_tenant_is_ordered_by_the_policy_only(
    policy: str, tenant: int, operations: list[tuple[str, int, int, int]]
) -> None:
    queue, waiting, taken = RequestQueue(policy), set[Request](), list[Request]()
    for number, (kind, _, priority, amount) in enumerate(operations):
        if kind == "add":
            request = waiting_request(number, tenant, priority, float(amount))
            waiting.add(request)
            queue.add_request(request)
        elif kind == "take" and waiting:
            taken.append(queue.peek_request())
            waiting.remove(taken[-1])
            queue.take_request(taken[-1])
        elif kind in ("put_back", "lose_place") and taken:
            waiting.add(taken[0])
            queue.add_request(taken.pop(0))
        elif kind == "charge":
            queue.charge(tenant, amount)
        assert list(queue) == sorted(waiting, key=queue.key)
        if waiting:
            assert queue.peek_request() is min(waiting, key=queue.key)


# ---- turns


def admission_order(driver: Driver) -> list[str]:
    """Run all requests and return the ids in the order of their admissions."""
    before = len(driver.diffs)
    driver.run()
    return [row.request_id for diff in driver.diffs[before:] for row in diff.new_requests]


@POLICIES
@BOTH
def test_new_tenant_is_admitted_before_a_flood(policy: str, asynchronous: bool) -> None:
    driver = Driver(max_num_seqs=1, scheduling_policy=policy, async_scheduling=asynchronous)
    for i in range(60):
        driver.add(f"flood{i:02}", [1, 2, 3], max_tokens=2, tenant=1)
    driver.step(6)
    driver.add("late", [4, 5], max_tokens=2, tenant=2)
    order = admission_order(driver)
    assert order.index("late") <= 1, order[:4]
    order.remove("late")
    assert order == sorted(order) and len(order) > 50
    driver.check_drained()


def test_new_tenant_waits_without_fair_admission() -> None:
    driver = Driver(max_num_seqs=1, fair_admission=False)
    for i in range(20):
        driver.add(f"flood{i}", [1, 2, 3], max_tokens=2, tenant=1)
    driver.add("late", [4, 5], max_tokens=2, tenant=2)
    assert admission_order(driver)[-1] == "late"


def test_priority_comes_before_turns() -> None:
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    driver.add("runs", [1], max_tokens=4, tenant=1, priority=-9)
    driver.step()
    for i in range(5):
        driver.add(f"urgent{i}", [1, 2, 3], max_tokens=2, tenant=1, priority=-1)
    driver.add("other", [4, 5], max_tokens=2, tenant=2)
    assert admission_order(driver)[-1] == "other"


@pytest.mark.parametrize("seed", thinned(range(4), keep=1))
def test_tenants_that_always_wait_are_served_equally(seed: int) -> None:
    """The bound of the virtual token counter on the difference in service between two tenants that always wait."""
    rng = random.Random(seed)
    driver = Driver(num_blocks=200, max_num_seqs=rng.choice((1, 2, 4)), enable_prefix_caching=False)
    served, largest = {1: 0, 2: 0}, 0
    sizes: dict[str, tuple[int, int]] = {}
    for i in range(20):
        for tenant in (1, 2):
            prompt, answer = (rng.randrange(1, 9), rng.randrange(1, 9)) if tenant == 1 else (30, 20)
            sizes[f"{tenant}:{i}"] = (prompt, answer)
            largest = max(largest, prompt + OUTPUT_WEIGHT * answer)
            driver.add(f"{tenant}:{i}", [i + 1] * prompt, max_tokens=answer, ignore_eos=True, tenant=tenant)
    while len({r.account for r in driver.scheduler.table.waiting}) == 2:
        driver.step()
        for diff in driver.diffs[-1:]:
            for row in diff.new_requests:
                if row.request_id in sizes:
                    prompt, answer = sizes.pop(row.request_id)
                    served[int(row.request_id[0])] += prompt + OUTPUT_WEIGHT * answer
        assert abs(served[1] - served[2]) <= 2 * largest * driver.config.max_num_seqs, served


# ---- shares of rows and blocks


@pytest.mark.parametrize(("policy", "asynchronous"), thinned(MATRIX, keep=1))
def test_long_requests_give_up_rows_for_another_tenant(policy: str, asynchronous: bool) -> None:
    driver = Driver(
        num_blocks=200, max_num_seqs=6, max_model_len=200, scheduling_policy=policy, async_scheduling=asynchronous
    )
    for i in range(9):
        driver.add(f"flood{i}", [i + 1] * 5, max_tokens=100, ignore_eos=True, tenant=1)
    driver.step(20)
    for i in range(5):
        driver.add(f"other{i}", [50 + i] * 3, max_tokens=20, ignore_eos=True, tenant=2)
    driver.step(12)
    assert driver.scheduler.tenants.rows == {1: 3, 2: 3}
    driver.step(50)
    assert all(driver.answers[f"other{i}"].ended for i in range(5))
    assert driver.scheduler.statistics().preemptions_by_reason["over_share"] <= 5
    driver.finish()
    for i in range(9):
        assert driver.answers[f"flood{i}"].tokens == expected_tokens([i + 1] * 5, 100)


def test_no_claims_between_tenants_with_equal_shares() -> None:
    driver = Driver(num_blocks=90, max_num_seqs=4)
    for tenant in (1, 2):
        for i in range(6):
            driver.add(f"{tenant}:{i}", [tenant, i], max_tokens=30, ignore_eos=True, tenant=tenant)
    driver.finish()
    assert driver.scheduler.statistics().num_preemptions == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_rows_are_claimed_in_one_step(asynchronous: bool) -> None:
    """Requests that arrive together at a full engine are admitted together, not one per step."""
    driver = Driver(num_blocks=200, max_num_seqs=8, async_scheduling=asynchronous)
    for i in range(12):
        driver.add(f"flood{i}", [1, i], max_tokens=60, ignore_eos=True, tenant=1)
    driver.step(4)
    for i in range(4):
        driver.add(f"other{i}", [2, i], max_tokens=6, ignore_eos=True, tenant=2)
    driver.step()
    running = {request.request_id for request in driver.scheduler.table.running.values()}
    assert {f"other{i}" for i in range(4)} <= running
    driver.finish()


def test_blocks_are_claimed_up_to_the_share() -> None:
    driver = Driver(num_blocks=33, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
    for i in range(4):
        driver.add(f"flood{i}", [i + 1] * 30, max_tokens=2 + 40 * (i == 0), ignore_eos=True, tenant=1)
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks < 10
    driver.add("other", [9] * 40, max_tokens=4, ignore_eos=True, tenant=2)
    driver.step(2)
    decisions = [d for d in driver.scheduler.decisions.take() if d.kind == "preempt"]
    assert {(d.reason, d.beneficiary) for d in decisions} == {(PreemptReason.OVER_SHARE, "other")}
    assert "flood0" not in {d.request_id for d in decisions}
    driver.finish()


def test_only_request_of_a_tenant_is_not_preempted_for_others() -> None:
    """The request holds almost the whole pool, and makes progress although others arrive all the time."""
    driver = Driver(num_blocks=33, max_num_seqs=8, max_model_len=128, enable_prefix_caching=False)
    driver.add("giant", [7] * 100, max_tokens=20, ignore_eos=True, tenant=1)
    driver.step(4)
    for i in range(40):
        driver.add(f"small{i}", [i] * 12, max_tokens=6, ignore_eos=True, tenant=2)
        driver.step()
    assert driver.answers["giant"].ended is not None
    driver.finish()


def test_long_prompt_leaves_half_of_each_step_to_another_tenant() -> None:
    driver = Driver(num_blocks=300, max_model_len=900, max_num_batched_tokens=20, max_num_seqs=4)
    driver.add("long", [1] * 800, max_tokens=1, tenant=1)
    driver.step(3)
    driver.add("short", [2] * 30, max_tokens=1, tenant=2)
    start = len(driver.diffs)
    while driver.answers["short"].ended is None:
        driver.step()
    assert len(driver.diffs) - start == 3, "ten tokens in each step"
    assert driver.counts(driver.diffs[-1])["long"] >= 10
    driver.finish()
    assert len(driver.diffs) == (800 + 30) // 20 + 1, "no token of a step was left unused"


@pytest.mark.parametrize(
    ("total", "wanted", "parts"),
    [
        (12, {1: 100}, {1: 12}),
        (12, {1: 100, 2: 100}, {1: 6, 2: 6}),
        (12, {1: 100, 2: 2}, {1: 10, 2: 2}),
        (13, {1: 100, 2: 2, 3: 5}, {1: 6, 2: 2, 3: 5}),
        (1, {1: 5, 2: 5}, {1: 1, 2: 1}),
        (0, {1: 5}, {1: 1}),
        (7, {}, {}),
    ],
)
def test_equal_parts(total: int, wanted: dict[int, int], parts: dict[int, int]) -> None:
    assert equal_parts(total, wanted) == parts


def test_block_is_taken_from_the_tenant_with_the_most() -> None:
    driver = Driver(num_blocks=25, max_num_seqs=8, enable_prefix_caching=False)
    for i in range(4):
        driver.add(f"many{i}", [i + 1] * 15, max_tokens=40, ignore_eos=True, tenant=1)
    driver.step()
    driver.add("one", [9] * 7, max_tokens=40, ignore_eos=True, tenant=2)
    driver.run()
    decisions = [d for d in driver.scheduler.decisions.take() if d.kind == "preempt"]
    assert [d.request_id for d in decisions[:2]] == ["many3", "many2"], "its tenant has the most blocks"
    assert driver.answers["many0"].tokens == expected_tokens([1] * 15, 40)
    driver.check_drained()


# ---- measured: a hostile tenant beside a well-behaved one


def steps_of_victim(flood: bool, **settings: object) -> list[int]:
    """Return the steps that each of six requests of tenant 2 takes from arrival to end."""
    driver = Driver(num_blocks=300, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, **settings)
    taken = []
    for i in range(6):
        if flood:
            for k in range(6):
                size = (5, 60, 180)[(i + k) % 3]
                driver.add(f"flood{i}:{k}", [i, k] * (size // 2), max_tokens=60, ignore_eos=True, tenant=1)
        driver.step(3)
        start = len(driver.diffs)
        driver.add(f"good{i}", [100 + i] * 20, max_tokens=30, ignore_eos=True, tenant=2)
        while driver.answers[f"good{i}"].ended is None:
            driver.step()
        taken.append(len(driver.diffs) - start)
    return taken


@pytest.mark.full
@BOTH
def test_flood_of_another_tenant_costs_few_steps(asynchronous: bool) -> None:
    alone = steps_of_victim(False, async_scheduling=asynchronous)
    beside = steps_of_victim(True, async_scheduling=asynchronous)
    unfair = steps_of_victim(True, async_scheduling=asynchronous, fair_admission=False)
    assert sum(beside) <= 1.1 * sum(alone)
    assert sum(unfair) > 1.5 * sum(alone), "the flood must cost steps without fair admission"


# ---- random runs


def test_a_flood_does_not_push_others_out_of_host_memory() -> None:
    """Tenant 1 stores 16 prompts of 10 blocks, then tenant 2 stores 40. Host memory has 128 pages, of which tenant 1
    keeps half, except for at most one chunk; its other blocks are in the device's pool."""
    found = {}
    for num_tenants in (2, 0):
        driver = Driver(61, num_host_pages=129, num_tenants=num_tenants)
        for tenant, count in ((1, 16), (2, 40)):
            for at in range(count):
                driver.add(f"{tenant}-{at}", [100 * tenant + at] * 41, max_tokens=2, tenant=tenant)
                driver.run()
        host = driver.scheduler.kv.tiers[0].pages
        found[num_tenants] = Counter(map(host.owner_of, host.free_block_queue.blocks()))
        driver.add("back", [115] * 41, max_tokens=2, tenant=1)
        driver.run()
        assert (driver.answers["back"].num_cached_tokens > 0) == (num_tenants == 2)
        driver.check_drained()
    assert found[2][1] >= 64 - CHUNK and found[2][1] + found[2][2] == 128 and found[0] == {0: 128}
