"""Steps with adapters: a request's bits depend on it and its adapter alone, in every kind of step and engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapter_steps import AdapterRunner, Answer, Request, logits_of
from adapters import make_adapter
from gguf_files import convert_checkpoint
from quantised_checkpoints import FORMATS, quantise_checkpoint
from thread_ranks import ThreadRank, on_ranks
from tiers import covering, thinned

from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.batch.input_batch import StepRefused

Factory = Callable[..., tuple[Path, Any]]

LENGTHS = [21, 2, 9, 13, 5, 17]
ADAPTERS = [1, 0, 2, 3, 1, 0]
NUM_TOKENS = 8
needs_library = pytest.mark.skipif(load_native() is None, reason="no C++ compiler")


def requests() -> list[Request]:
    generator = np.random.default_rng(4)
    return [(generator.integers(3, 97, n).tolist(), number) for n, number in zip(LENGTHS, ADAPTERS, strict=True)]


def without(given: list[Request]) -> list[Request]:
    return [(prompt, 0) for prompt, _ in given]


def loaded(folder: Path, adapters: Path, *, group: ThreadRank | None = None, **settings: Any) -> AdapterRunner:
    """Return a runner with the adapters 1 to 3 of several ranks in slots 2, 0 and 1."""
    runner = AdapterRunner(folder, group=group, **settings)
    names = ("q_proj", "v_proj", "down_proj"), ("k_proj", "o_proj", "up_proj"), ("gate_proj", "q_proj", "gate")
    for number, (rank, slot, projections) in enumerate(zip((4, 9, 1), (2, 0, 1), names, strict=True), 1):
        path = adapters / f"adapter-{number}"
        if not path.exists():
            make_adapter(path, runner.config.model, rank=rank, seed=number, size=1.0, projections=projections)
        assert runner.load(path, number, slot).problem == ""
    return runner


@pytest.mark.parametrize(("family", "dtype"), covering(["llama", "qwen3_moe"], ["float32", "bfloat16"]))
def test_request_of_a_mixed_batch_has_the_bits_that_it_has_alone(
    family: str, dtype: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    runner = loaded(checkpoint_factory(family)[0], tmp_path, dtype=dtype)
    mixed = runner.generate(requests(), NUM_TOKENS)
    alone = [runner.generate([request], NUM_TOKENS)[0] for request in requests()]
    assert mixed == alone
    plain = runner.generate(without(requests()), NUM_TOKENS)
    assert [a == b for a, b in zip(mixed, plain, strict=True)] == [number == 0 for number in ADAPTERS]


def test_requests_without_an_adapter_have_the_bits_of_an_engine_without_adapters(
    checkpoint_factory: Factory, tmp_path: Path
) -> None:
    folder = checkpoint_factory("llama")[0]
    plain = AdapterRunner(folder, enable_lora=False)
    assert loaded(folder, tmp_path).generate(without(requests()), 4) == plain.generate(without(requests()), 4)


@needs_library
def test_recorded_passes_give_the_bits_of_eager_ones(checkpoint_factory: Factory, tmp_path: Path) -> None:
    folder = checkpoint_factory("llama")[0]
    recorded, eager = (loaded(folder, tmp_path, enforce_eager=flag) for flag in (False, True))
    for given in (requests(), without(requests()), requests()[::-1]):
        assert recorded.generate(given, NUM_TOKENS) == eager.generate(given, NUM_TOKENS)
    assert len(eager.runner.passes) == 0 < len(recorded.runner.passes)


@needs_library
def test_steps_without_adapters_run_the_plans_of_an_engine_without_adapters(
    checkpoint_factory: Factory, tmp_path: Path
) -> None:
    folder = checkpoint_factory("llama")[0]
    runners = AdapterRunner(folder, enable_lora=False), loaded(folder, tmp_path)
    profiles = []
    for runner in runners:
        runner.generate([([5, 6, 7], 0)], 4)
        plan = runner.runner.passes.plan(1)
        assert plan is not None
        profiles.append(set(plan.profile()))
    assert profiles[0] == profiles[1] and "adapters" not in profiles[1]
    runners[1].generate([([5, 6, 7], 1)], 4)
    recorded = runners[1].runner.passes._passes[1, True].plan
    assert "adapters" in recorded.profile()


@pytest.mark.parametrize("family", thinned(["mixtral", "llama"], keep=1))
def test_two_ranks_equal_one(family: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    folder, given = checkpoint_factory(family)[0], requests()
    one = loaded(folder, tmp_path)
    expected, tokens = logits_of(one, given), [tokens for tokens, _ in one.generate(given, NUM_TOKENS)]

    def rank(group: ThreadRank) -> tuple[list[torch.Tensor], list[Answer]]:
        runner = loaded(folder, tmp_path, group=group, tensor_parallel_size=2)
        return logits_of(runner, given), runner.generate(given, NUM_TOKENS)

    first, second = on_ranks(2, rank)
    assert first[1] == second[1] and [own for own, _ in first[1]] == tokens
    for own, other in zip(first[0], expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", thinned(["w4a16", "w8a16", "Q8_0"], keep=1))
def test_quantised_weights_below_adapters(form: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    """The logits are those of the weights that the stored numbers stand for, with the same adapters."""
    source, _ = checkpoint_factory("llama", hidden_size=64, intermediate_size=96)
    if form == "Q8_0":
        packed, plain = tmp_path / "model.gguf", tmp_path / "plain"
        convert_checkpoint(source, packed, plain, form)
    else:
        packed, plain = tmp_path / "packed", quantise_checkpoint(source, tmp_path, FORMATS[form]())
    quantised, wide = loaded(packed, tmp_path), loaded(plain, tmp_path)
    given = requests()
    for own, other in zip(logits_of(quantised, given), logits_of(wide, given), strict=True):
        torch.testing.assert_close(own, other, atol=5e-4, rtol=5e-4)
    mixed = quantised.generate(given, NUM_TOKENS)
    assert mixed == [quantised.generate([request], NUM_TOKENS)[0] for request in given]
    assert all(a != b for a, b in zip(mixed, quantised.generate(without(given), NUM_TOKENS), strict=True) if a[0] == 1)


def test_active_row_without_its_adapter_in_a_slot_is_refused(checkpoint_factory: Factory, tmp_path: Path) -> None:
    runner = loaded(checkpoint_factory("llama")[0], tmp_path)
    for number, of in ((4, runner), (1, AdapterRunner(checkpoint_factory("llama")[0], enable_lora=False))):
        with pytest.raises(StepRefused, match=f"handle 7 uses adapter {number}, which is in no slot"):
            of.step(**of.adding([7], [([5, 6], number)]), counts=[(7, 2)])
        of.steps -= 1
    runner.step(**runner.adding([7, 8], [([5, 6], 1), ([5, 6], 2)]), counts=[(7, 2), (8, 2)])
    runner.step(parked=[7])
    path = make_adapter(tmp_path / "fourth", runner.config.model, seed=9)
    assert runner.load(path, 4, 2).problem == ""
    runner.step()  # the parked row has lost its slot
    with pytest.raises(StepRefused, match="handle 7 uses adapter 1, which is in no slot"):
        runner.step(unparked=[7])
    runner.steps -= 1
    runner.step()
    assert runner.load(tmp_path / "adapter-1", 1, 0).problem == ""
    with pytest.raises(StepRefused, match="handle 8 uses adapter 2, which is in no slot"):
        runner.step()  # without a change of rows


def test_fork_with_another_adapter_than_its_parent_is_refused(checkpoint_factory: Factory, tmp_path: Path) -> None:
    runner = loaded(checkpoint_factory("llama")[0], tmp_path)
    fields = runner.adding([7, 8], [([5, 6], 1), ([5, 6], 2)])
    fields["new_requests"][1] = msgspec.structs.replace(fields["new_requests"][1], num_computed_tokens=2)
    with pytest.raises(StepRefused, match="handle 8 with adapter 2 cannot be forked from handle 7 with adapter 1"):
        runner.step(**fields, counts=[(7, 2)], forks=[(8, 7)])


def test_new_scheduler_begins_without_adapters(checkpoint_factory: Factory, tmp_path: Path) -> None:
    runner = loaded(checkpoint_factory("llama")[0], tmp_path)
    before = runner.generate(requests(), 4)
    runner.runner.begin_worker_epoch(runner.steps)
    runner.loader.begin_worker_epoch()
    runner.leaving = []
    with pytest.raises(StepRefused, match="adapter 1, which is in no slot"):
        runner.generate(requests(), 4)
    runner.steps -= 1
    for number, slot in ((1, 0), (2, 1), (3, 3)):
        answer = runner.load(tmp_path / f"adapter-{number}", number, slot)
        assert answer.problem == "" and not answer.was_cached
    assert runner.generate(requests(), 4) == before


def test_adapter_that_changes_no_expert_is_not_sorted_for_each_expert(
    checkpoint_factory: Factory, tmp_path: Path
) -> None:
    runner = AdapterRunner(checkpoint_factory("mixtral")[0])
    names = {"a": ["q_proj", "gate"], "b": ["up_proj"]}
    for number, (name, projections) in enumerate(names.items(), 1):
        make_adapter(tmp_path / name, runner.config.model, projections=projections)
        assert runner.load(tmp_path / name, number, number).problem == ""
    assert runner.runner.adapters is not None
    routed = runner.runner.adapters.sites._routed
    runner.generate([([5, 6, 7], 1), ([5, 6, 7], 0)], 4)
    assert len(routed.slots) == 0
    runner.generate([([5, 6, 7], 2), ([5, 6, 7], 0)], 4)
    assert len(routed.slots) > 0


def test_engine_without_the_library_computes_the_same_tokens(
    checkpoint_factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_factory("mixtral")[0]
    native = loaded(folder, tmp_path).generate(requests(), NUM_TOKENS)
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    plain = loaded(folder, tmp_path)
    answers = plain.generate(requests(), NUM_TOKENS)
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in native]


def test_model_has_no_part_of_adapters_unless_they_are_enabled(checkpoint_factory: Factory) -> None:
    folder = checkpoint_factory("qwen3_moe")[0]
    runner = AdapterRunner(folder, enable_lora=False)
    assert runner.runner.adapters is None
    kinds = {type(module).__name__ for module in runner.runner.forward.model.modules()}
    assert "WithAddition" not in kinds and load_model_config(folder) == runner.config.model
