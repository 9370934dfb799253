"""The seam between the core of the scheduler and its features: names, order, the memo of a refusal, and one more."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from fake_adapters import adapter_ref
from fake_items import image
from keyframed_runs import keyframe_of, tails
from log_replay import replay
from scheduler_driver import Driver

from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.wire.side_rows import SIDE_KINDS, RowsOf, SideKind, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc import scheduler as scheduler_module
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.core.planner import Planner
from quire.scheduler_proc.core.step import StepPlan
from quire.scheduler_proc.features.adapters.adapters import Adapters
from quire.scheduler_proc.messages.results import Sampled
from quire.scheduler_proc.messages.steps import StepRow
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.trace import snapshot_reader

NAMES = (
    r"adapters?|loras?|tiers?|transfers|programs?|pins?|pinned|forks?|forked|beams?|tenants?|suspects?|images?|encod\w*"
)


def test_core_names_no_capability() -> None:
    """Only as a word of its own or a part of an identifier."""
    word = re.compile(rf"(?<![a-z])({NAMES})(?![a-z])", re.IGNORECASE)
    folder = Path(scheduler_module.__file__).parent / "core"
    found = {path.name: sorted(set(word.findall(path.read_text()))) for path in folder.glob("*.py")}
    assert {name: words for name, words in found.items() if words} == {}


def _rows_full_of_one_adapter() -> None:
    """All rows belong to an adapter whose turn ends, while the first waiting request has one that loses its slot."""
    driver = Driver(200, max_num_seqs=2, enable_lora=True, max_loras=1, max_cpu_loras=3, async_scheduling=True)
    for number in range(8):
        driver.add(str(number), [1 + number], max_tokens=40, adapter=adapter_ref("abcd"[number % 4]))
    driver.finish()


def _wrong_answers(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> tuple[int, list[Any]]:
    """Return how often the memo of the planner answered, and where ``admit`` would have answered otherwise."""
    obstacle, admit = Planner.admission_obstacle, Planner.admit
    asked: list[Request] = []
    answers: list[Any] = []

    def counted(self: Planner, plan: StepPlan, request: Request, **options: Any) -> WaitReason | None:
        asked.append(request)
        return admit(self, plan, request, **options)

    def checked(self: Planner, plan: StepPlan, request: Request) -> WaitReason | None:
        asked.clear()
        reason = obstacle(self, plan, request)
        if asked:
            return reason
        answers.append((reason, admit(self, plan, request)))
        return cast(WaitReason | None, answers[-1][1])

    monkeypatch.setattr(Planner, "admit", counted)
    monkeypatch.setattr(Planner, "admission_obstacle", checked)
    run()
    return len(answers), [each for each in answers if each[0] is not each[1]]


def _no_room_for_rows() -> None:
    """The first waiting request has an image for whose rows there is no room until another one has computed its own."""
    driver = Driver(65, long_prefill_token_threshold=1, vision=VisionConfig("", 9), encoder_cache_tokens=8)
    for name, begin in (("a", 20), ("b", 0)):
        driver.add(name, list(range(30)), max_tokens=5, items=[image(name, (begin, 8))])
    driver.finish()


@pytest.mark.parametrize("run", [_rows_full_of_one_adapter, _no_room_for_rows])
def test_the_memo_of_a_refusal_is_true(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    num_answers, wrong = _wrong_answers(monkeypatch, run)
    assert num_answers > 3 and not wrong


def test_without_versions_of_features_the_memo_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapters, "version", Feature.version)
    _, wrong = _wrong_answers(monkeypatch, _rows_full_of_one_adapter)
    assert set(wrong) == {(WaitReason.MAX_NUM_SEQS, WaitReason.ADAPTER)}


MADE_UP = SideKind(9, "made-up rows", RowsOf.PROMPT, "made_up", 1, (True,), lambda *_: 1, lambda rows: rows[0])


class Thirds(Feature):
    """A capability that was made up: each third request waits for two steps, a step has room for two new ones, and each
    request gets a row beside its tokens."""

    name = "thirds"
    reason = WaitReason.STREAMING

    def __init__(self, core: Core) -> None:
        self._core = core
        self.num_added = self.num_held = 0
        self.free_at: dict[int, int] = {}
        self.most_new = 0

    def added(self, request: Request) -> None:
        self.num_added += 1
        if self.num_added % 3 == 0:
            self.free_at[request.handle] = -1

    def ended(self, request: Request) -> None:
        self.free_at.pop(request.handle, None)

    def obstacle(self, request: Request) -> WaitReason | None:
        if self.free_at.get(request.handle) == -1:
            self.num_held += 1
            self.free_at[request.handle] = self._core.next_step + 2
        return self.reason if self._core.next_step < self.free_at.get(request.handle, 0) else None

    def version(self, request: Request) -> object:
        return self._core.next_step < self.free_at.get(request.handle, 0)

    def budget(self) -> "Thirds.Budget":
        return Thirds.Budget(self)

    def check(self) -> None:
        assert self.free_at.keys() <= {request.handle for request in self._core.table.requests.values()}

    class Budget:
        reason = WaitReason.STREAMING

        def __init__(self, owner: "Thirds") -> None:
            self._owner, self._new = owner, set[int]()

        def left(self, request: Request, num_computed: int) -> int:
            return 99 if request.on_worker or len(self._new) < 2 else 0

        def take(self, row: StepRow) -> None:
            if not row.request.on_worker:
                self._new.add(row.request.handle)
                self._owner.most_new = max(self._owner.most_new, len(self._new))

        def give_back(self, row: StepRow) -> None:
            self._new.discard(row.request.handle)


@pytest.mark.parametrize("seed", range(2))
def test_a_made_up_feature_needs_no_edit_of_the_core(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by keyframes and statistics, and its runs are replayed."""
    make_features = scheduler_module.Scheduler.make_features
    monkeypatch.setattr(
        scheduler_module.Scheduler, "make_features", lambda self, core: (*make_features(self, core), Thirds(core))
    )
    monkeypatch.setattr(snapshot_reader, "_PACKAGES", (*snapshot_reader._PACKAGES, __name__))
    monkeypatch.setitem(SIDE_KINDS, MADE_UP.number, MADE_UP)
    driver = Driver(num_blocks=60, max_num_batched_tokens=64)
    asked, got = set[str](), list[str]()
    results, outputs = driver.scheduler.results, driver.scheduler.core.outputs
    update, sampled = results.update_from_output, outputs.sampled

    def with_rows(output: ModelRunnerOutput) -> None:
        """Add the row of each new request to a result, as a worker would."""
        step = driver.scheduler.in_flight.records[0]
        new = [r for r in step.requests().values() if r.request_id not in asked]
        asked.update(request.request_id for request in new)
        rows = SideRows.of(MADE_UP, ((r.handle, 1, [np.full((1, 1), r.handle, np.int32)]) for r in new))
        update(msgspec.structs.replace(output, side=rows))

    def passed_on(result: Sampled, cut: Any, owners: Any) -> None:
        got.extend(f"{owner}" for clients in owners for owner in clients)
        sampled(result, cut, owners)

    monkeypatch.setattr(results, "update_from_output", with_rows)
    monkeypatch.setattr(outputs, "sampled", passed_on)
    rng = random.Random(seed)

    def burst(name: str) -> None:
        for index in range(9):
            driver.add(f"{name} {index}", [rng.randrange(9)] * 9, max_tokens=rng.randrange(1, 20))
        driver.run()

    burst("before")
    keyframe_of(driver)
    burst("after")
    thirds: Any = vars(driver.scheduler)["thirds"]
    assert thirds.num_held == 6 and thirds.most_new == 2 and not thirds.free_at
    assert got == ["0"] * len(asked) and len(asked) == 18, "each request has a row, which its client gets"
    (tail,) = tails(driver)
    assert replay(driver.header, list(driver.log)) is None
    assert replay(driver.header, tail, check=True) is None
