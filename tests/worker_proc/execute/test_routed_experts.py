"""Routed experts in the results of steps, against the router logits of transformers for the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoints import experts_of
from inprocess import InProcessEngine
from runner_steps import CONFIG, MODEL, Runner, adding
from thread_ranks import ThreadRank, on_ranks
from tiers import covering, thinned

from quire.protocol.config import SpeculativeConfig
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import MoeConfig
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.worker_proc.execute import routed_experts
from quire.worker_proc.startup.setup import make_runner

Checkpoints = Callable[..., tuple[Path, Any]]

LONG = [5 + 7 * i % 83 for i in range(40)]
"""A prompt of several blocks and chunks."""


class RoutedEngine(InProcessEngine):
    """Collects the rows of each request, as a client does: repeats are the same, and no row is missing."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.rows: dict[str, list[list[int]]] = {}
        self.num_repeats = 0
        given = {"block_size": 4, "max_model_len": 96, "deterministic": True}
        super().__init__(folder, enable_return_routed_experts=True, **given | settings)

    def add(self, request_id: str, prompt: list[int], *rest: Any, **sampling: Any) -> None:
        super().add(request_id, prompt, *rest, **{"return_routed_experts": True} | sampling)

    def _execute(self, diff: SchedulerOutput) -> ModelRunnerOutput:
        result = super()._execute(diff)
        names = {request.handle: request.request_id for request in self.scheduler.table.requests.values()}
        for side in result.side:
            assert side.shape_error() is None
            for handle, start, (rows,) in side.parts():
                if handle not in names:
                    continue  # it has ended
                known = self.rows.setdefault(names[handle], [])
                assert start <= len(known) and len(rows)
                assert known[start : start + len(rows)] == rows.tolist()[: len(known) - start]
                self.num_repeats += min(len(known) - start, len(rows))
                known += rows.tolist()[len(known) - start :]
        return result

    def check_rows(self, model: Any, **prompts: list[int]) -> None:
        """Compare the rows of these requests, and of no others, with transformers'."""
        assert self.rows.keys() == prompts.keys()
        for name, prompt in prompts.items():
            computed = [*prompt, *self.answers[name].tokens[:-1]]
            assert self.rows[name][: len(computed)] == experts_of(model, computed), name


@pytest.mark.parametrize("family", thinned(["qwen3_moe", "mixtral", "llama4"], keep=1))
def test_prompts_and_answers(family: str, checkpoint_factory: Checkpoints) -> None:
    """Prompts in chunks beside decoding rows; one request does not ask."""
    folder, model = checkpoint_factory(family)
    engine = RoutedEngine(folder, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add("short", [7, 8, 9], max_tokens=20)
    engine.step()
    engine.add("long", LONG, max_tokens=6)
    engine.add("silent", LONG[::-1], max_tokens=6, return_routed_experts=False)
    engine.add("one", [3], max_tokens=1)
    engine.run()
    engine.check_rows(model, short=[7, 8, 9], long=LONG, one=[3])
    assert engine.num_repeats == 0


def test_prefix_hits_have_the_experts_of_the_request_that_computed_them(checkpoint_factory: Checkpoints) -> None:
    folder, model = checkpoint_factory("qwen3_moe")
    engine = RoutedEngine(folder)
    engine.add("first", LONG, max_tokens=9, return_routed_experts=False)
    known = engine.run()["first"].tokens
    second, third = [*LONG, *known[:5], 4, 4], [*LONG[:10], 90]
    engine.add("second", second, max_tokens=5)
    engine.add("third", third, max_tokens=1)
    engine.run()
    assert engine.answers["second"].num_cached_tokens == 44 and engine.answers["third"].num_cached_tokens == 8
    engine.check_rows(model, second=second, third=third)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "prompt"), covering(["gpt_oss", "mixtral", "qwen3_moe"], [[5, 6, 7, 8, 9, 10], LONG])
)
def test_forked_requests_have_all_rows(family: str, prompt: list[int], checkpoint_factory: Checkpoints) -> None:
    """gpt-oss has a group with a window, which does not keep all positions."""
    folder, model = checkpoint_factory(family)
    engine = RoutedEngine(folder, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add("parent", prompt, max_tokens=20, temperature=2.0, seed=1)
    for child in range(2):
        fork = ("parent", len(prompt))
        engine.add(f"child{child}", [], forked_from=fork, max_tokens=3 * child + 1, temperature=2.0, seed=2 + child)
    while len(engine.answers["parent"].tokens) < 8:
        engine.step()
    engine.add("late", [], forked_from=("parent", len(prompt) + 6), max_tokens=12, temperature=2.0, seed=5)
    engine.run()
    late = [*prompt, *engine.answers["parent"].tokens[:6]]
    engine.check_rows(model, parent=prompt, child0=prompt, child1=prompt, late=late)


@pytest.mark.full
def test_recomputed_requests_repeat_their_rows(checkpoint_factory: Checkpoints) -> None:
    """The pool has room for two of the requests: they are preempted, and recomputed."""
    folder, model = checkpoint_factory("qwen3_moe")
    engine = RoutedEngine(folder, num_blocks_override=24, max_num_seqs=4)
    prompts = {f"r{i}": [i, *LONG[i:16]] for i in range(1, 5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=30)
    engine.run()
    assert engine.statistics().num_preemptions
    assert engine.num_repeats
    engine.check_rows(model, **prompts)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.full)])
def test_rejected_drafts_have_no_rows(family: str, checkpoint_factory: Checkpoints) -> None:
    folder, model = checkpoint_factory(family)
    speculative = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)
    engine = RoutedEngine(folder, num_speculative_tokens=3, speculative=speculative)
    prompts = {"a": [5, 6, 5, 6, 5, 6, 5], "b": LONG}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=40)
    engine.run()
    drafted = engine.statistics().num_draft_tokens, engine.statistics().num_accepted_tokens
    assert 0 < drafted[1] < drafted[0]
    engine.check_rows(model, **prompts)


def test_first_rank_alone_reports(checkpoint_factory: Checkpoints) -> None:
    folder, model = checkpoint_factory("qwen3_moe")
    config = RoutedEngine(folder).config

    def work(rank: ThreadRank) -> tuple[Any, Any]:
        ranks = msgspec.structs.replace(config, tensor_parallel_size=2)
        layout = kv_layout(config.model, 4, "float32")
        runner, _ = make_runner(ranks, layout, group=rank)
        step = adding((0, LONG, list(range(1, 11))), return_routed_experts=True)
        return runner.execute(SchedulerOutput(1, **step)).result().side, runner.forward.experts

    ((reported,), _), (nothing, table) = on_ranks(2, work)
    assert nothing == [] and table is None
    assert reported.ints[0].reshape(40, -1).tolist() == experts_of(model, LONG)


MOE = MoeConfig(num_experts=300, num_experts_per_token=3, intermediate_size=8, layers=[1])


def test_result_that_is_too_large_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rows report, and so do all in the next step."""
    monkeypatch.setattr(routed_experts, "MOST_STEP_BYTES", 6 * 3 * 4)
    runner = experts_runner()
    rows = (0, [1, 2, 3], [1, 2]), (1, [4] * 8, [3, 4, 5]), (2, [5, 6], [6])
    result = runner.result(**adding(rows[0], rows[1], return_routed_experts=True))
    assert [rows.handles for rows in result.side] == [[0]]
    assert [handle for handle, _ in result.failed] == [1] and "exceed" in result.failed[0][1]
    result = runner.result(removed=[1], **adding(rows[2], return_routed_experts=True))
    assert not result.failed
    parts = [(handle, start, len(rows)) for handle, start, (rows,) in result.side[0].parts()]
    assert parts == [(0, 3, 1), (2, 0, 2)]


def test_ids_above_255() -> None:
    step = adding((0, list(range(1, 25)), [1, 2, 3, 4, 5, 6]), return_routed_experts=True)
    (reported,) = experts_runner().result(**step).side
    assert len(reported.ints[0]) == 24 * 3 and 255 < reported.ints[0].max() < 300


def test_nothing_is_kept_without_the_flag() -> None:
    runner = experts_runner(enable_return_routed_experts=False)
    assert runner.runner.forward.experts is None
    step = adding((0, [1, 2, 3], [1, 2]), return_routed_experts=True)
    assert not runner.result(**step).side


def test_memory_plan_has_the_table() -> None:
    """Blocks of 4 positions, with 3 ids of 2 bytes each."""
    layout = kv_layout(MODEL, 4, "float32")
    config = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(MODEL, moe=MOE))
    kept = msgspec.structs.replace(config, enable_return_routed_experts=True)
    without, plan = (make_runner(each, layout)[1].plan for each in (config, kept))
    assert plan.kv_cache - without.kv_cache == plan.num_blocks * 4 * 3 * 2


def experts_runner(**settings: Any) -> Runner:
    model = msgspec.structs.replace(MODEL, moe=MOE)
    config = msgspec.structs.replace(CONFIG, **{"model": model, "enable_return_routed_experts": True} | settings)
    runner = Runner()
    runner.runner, _ = make_runner(config, kv_layout(model, 4, "float32"))
    return runner
