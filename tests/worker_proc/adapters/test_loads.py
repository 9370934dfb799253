"""Loads of adapters: beside steps, cached, dropped, and failures that end nothing but the load."""

import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from adapter_steps import BLOCK_SIZE, AdapterRunner, adapter_config
from adapters import Tensors, make_adapter
from scripted_worker import Script, worker_loop

from quire.protocol.errors import EngineError
from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.wire.adapter_messages import AdapterLoaded, LoadAdapter
from quire.protocol.wire.worker_messages import (
    Configure,
    ModelRunnerOutput,
    SampleInputs,
    SchedulerOutput,
)
from quire.worker_proc.adapters import loader
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.loop import WorkerLoop
from quire.worker_proc.parallel.group import SingleRank

Factory = Callable[..., tuple[Path, Any]]
PROMPT = [5, 9, 2, 7, 7, 1]


@pytest.fixture
def folder(checkpoint_factory: Factory) -> Path:
    return checkpoint_factory("llama")[0]


def first_logprobs(runner: AdapterRunner, number: int) -> bytes:
    return runner.generate([(PROMPT, number)], 1)[0][1][0]


def test_load_reports_its_bytes_and_whether_it_was_cached(folder: Path, tmp_path: Path) -> None:
    runner = AdapterRunner(folder)
    path = make_adapter(tmp_path / "a", runner.config.model, rank=4)
    first = runner.load(path, 1, 0)
    num_bytes = read_adapter(path, runner.config.model, 64).num_bytes  # float32, as the engine
    assert (first.number, first.slot, first.problem, first.was_cached) == (1, 0, "", False)
    assert num_bytes <= first.num_bytes < num_bytes + 64 * 28 and first.seconds > 0
    expected = first_logprobs(runner, 1)
    moved = runner.load(path, 1, 3)
    assert moved.was_cached and moved.num_bytes == first.num_bytes
    assert runner.runner.adapters is not None and runner.runner.adapters.slot_of == {1: 3}
    assert first_logprobs(runner, 1) == expected


def test_cached_adapter_is_not_read_again(folder: Path, tmp_path: Path) -> None:
    runner = AdapterRunner(folder)
    path, other = (make_adapter(tmp_path / name, runner.config.model, seed=seed) for seed, name in enumerate("ab"))
    digest = read_adapter(path, runner.config.model, 64).digest
    runner.load(path, 1, 0)
    expected = first_logprobs(runner, 1)
    (path / "adapter_model.safetensors").unlink()
    runner.load(other, 2, 0)
    assert first_logprobs(runner, 2) != expected
    assert runner.load(path, 1, 1, digest=digest).was_cached
    assert first_logprobs(runner, 1) == expected


def test_dropped_adapter_leaves_host_memory_and_its_slot(folder: Path, tmp_path: Path) -> None:
    runner = AdapterRunner(folder)
    path, other = (make_adapter(tmp_path / name, runner.config.model, seed=seed) for seed, name in enumerate("ab"))
    runner.load(path, 1, 0)
    runner.load(other, 2, 1, dropped=[1])
    assert runner.runner.adapters is not None and runner.runner.adapters.slot_of == {2: 1}
    assert list(runner.loader._held) == [2]
    sites = runner.runner.adapters.sites
    assert all(not table.parts(0) for table in sites._tables) and any(table.parts(1) for table in sites._tables)
    with pytest.raises(StepRefused, match="adapter 1, which is in no slot"):
        runner.generate([(PROMPT, 1)], 1)
    runner.steps -= 1
    assert not runner.load(path, 1, 0).was_cached


def break_nan(path: Path, runner: AdapterRunner) -> None:
    def change(tensors: Tensors) -> None:
        tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"][0, 3] = np.nan

    make_adapter(path, runner.config.model, change=change)


def break_folder(path: Path, runner: AdapterRunner) -> None:
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_config.json").unlink()
    path.rmdir()


def break_content(path: Path, runner: AdapterRunner) -> None:
    make_adapter(path, runner.config.model, seed=8)


def break_file(path: Path, runner: AdapterRunner) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def break_rank(path: Path, runner: AdapterRunner) -> None:
    make_adapter(path, runner.config.model, rank=65)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_nan, "values that are not finite"),
        (break_folder, "is not a folder with an adapter"),
        (break_content, "its content has changed since it was requested"),
        (break_file, "is truncated, damaged"),
        (break_rank, "r must be an integer from 1 to 64"),
    ],
)
def test_failed_load_is_answered_with_the_reason(
    damage: Callable[[Path, AdapterRunner], None], reason: str, folder: Path, tmp_path: Path
) -> None:
    runner = AdapterRunner(folder)
    good, path = make_adapter(tmp_path / "good", runner.config.model), make_adapter(tmp_path / "a", runner.config.model)
    digest = read_adapter(path, runner.config.model, 64).digest
    runner.load(good, 1, 0)
    expected = first_logprobs(runner, 1)
    damage(path, runner)
    answer = runner.load(path, 2, 1, digest=digest)
    assert (answer.number, answer.slot) == (2, 1) and reason in answer.problem and "\n" not in answer.problem
    assert first_logprobs(runner, 1) == expected
    with pytest.raises(StepRefused, match="adapter 2, which is in no slot"):
        runner.generate([(PROMPT, 2)], 1)


def test_values_that_are_not_finite_in_the_engines_dtype(folder: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"][0, 3] = 1e6

    runner = AdapterRunner(folder, dtype="float16")
    path = make_adapter(tmp_path / "a", runner.config.model, change=change)
    is_half = runner.runner.forward.model.build.activation_dtype.itemsize == 2
    problem = runner.load(path, 1, 0).problem
    assert ("has values that are not finite in float16" in problem) == is_half


def test_unexpected_error_is_an_answer_too(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    runner = AdapterRunner(folder)
    path = make_adapter(tmp_path / "a", runner.config.model)
    monkeypatch.setattr(loader, "pack_adapter", fail)
    assert runner.load(path, 1, 0).problem == "MemoryError"


@pytest.mark.parametrize(("number", "slot"), [(0, 0), (-1, 0), (1, 4), (1, -1)])
def test_load_out_of_range_is_refused(number: int, slot: int, folder: Path) -> None:
    runner = AdapterRunner(folder)
    with pytest.raises(StepRefused, match="numbers start at 1, and slots are 0 to 3"):
        runner.loader.submit(LoadAdapter(number, bytes(32), "/nowhere", slot))


def test_load_of_the_previous_scheduler_is_forgotten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = AdapterRunner(folder)
    path = make_adapter(tmp_path / "a", runner.config.model)
    digest = read_adapter(path, runner.config.model, 64).digest
    reading, may_end, read = Event(), Event(), loader.read_adapter
    reads: list[Path] = []

    def slow(*args: Any) -> Any:
        reads.append(args[0])
        reading.set()
        assert may_end.wait(10)
        return read(*args)

    monkeypatch.setattr(loader, "read_adapter", slow)
    for number in (1, 2):  # one is being read, one waits
        runner.loader.submit(LoadAdapter(number, digest, str(path), 0))
    assert reading.wait(10)
    runner.loader.begin_worker_epoch()
    may_end.set()
    answer = runner.load(path, 3, 1)
    assert (answer.number, answer.problem, len(reads)) == (3, "", 2), "the load that waited was not begun"
    assert list(runner.loader._held) == [3]
    assert runner.runner.adapters is not None and runner.runner.adapters.slot_of == {3: 1}


def test_adapter_larger_than_a_slot_of_the_device(checkpoint_factory: Factory, tmp_path: Path) -> None:
    """Adapters of experts may be: a GPU's slots have room for the other projections at the highest rank."""
    runner = AdapterRunner(checkpoint_factory("mixtral")[0], max_lora_rank=4)
    slots = runner.runner.adapters
    assert slots is not None
    slots._memory = torch.empty(slots.sites.num_slots, slots.sites.slot_bytes, dtype=torch.uint8)
    path = make_adapter(tmp_path / "a", runner.config.model, rank=4)
    assert re.fullmatch(
        r"the adapter has \d+ bytes, a slot of the device \d+: raise --max-lora-rank", runner.load(path, 1, 0).problem
    )


# ---- the worker's loop


def serve(loop: WorkerLoop, folder: Path, *messages: Any, epoch: int = 1, **settings: Any) -> Script:
    config = adapter_config(folder, **settings)
    configure = Configure(epoch, kv_layout(config.model, BLOCK_SIZE, "float32"), config)
    script = Script(configure, *messages)
    loop.serve(script, 0, lambda config: SingleRank())
    return script


def test_worker_loads_adapters_between_and_within_steps(folder: Path, tmp_path: Path) -> None:
    expected = AdapterRunner(folder)
    path = make_adapter(tmp_path / "a", expected.config.model, size=1.0)
    load = LoadAdapter(1, read_adapter(path, expected.config.model, 64).digest, str(path), 0)
    expected.answer(load)
    (tokens, _), (plain, _) = expected.generate([(PROMPT, 1), (PROMPT, 0)], 2, chunk=6)
    missing = LoadAdapter(2, bytes(32), str(tmp_path / "missing"), 1)
    alone = expected.adding([4], [(PROMPT, 0)]) | {"removed": []}
    both = expected.adding([5, 6], [(PROMPT, 0), (PROMPT, 1)]) | {"removed": [4]}
    first = SchedulerOutput(1, **alone, counts=[(4, 6)], awaits_sample_inputs=True)
    second = SchedulerOutput(2, **both, counts=[(5, 6), (6, 6)])
    with worker_loop() as loop:
        script = serve(loop, folder, first, load, missing, 2, SampleInputs(1, [], []), second, SchedulerOutput(3))
    loaded, failed = script.of(AdapterLoaded)
    assert loaded.problem == "" and "missing is not a folder with an adapter" in failed.problem
    results = [message.tokens.tolist() for message in script.of(ModelRunnerOutput)]
    assert results == [plain[:1], [plain[0], tokens[0]], [plain[1], tokens[1]]]


def test_next_scheduler_of_a_worker_loads_again(folder: Path, tmp_path: Path) -> None:
    config = adapter_config(folder)
    path = make_adapter(tmp_path / "a", config.model)
    load = LoadAdapter(1, read_adapter(path, config.model, 64).digest, str(path), 0)
    with worker_loop() as loop:
        first, second = (serve(loop, folder, load, 1, epoch=epoch) for epoch in (1, 2))
    assert [message.was_cached for each in (first, second) for message in each.of(AdapterLoaded)] == [False, False]


def test_worker_without_adapters_refuses_loads(folder: Path) -> None:
    with worker_loop() as loop, pytest.raises(EngineError, match="unexpected LoadAdapter"):
        serve(loop, folder, LoadAdapter(1, bytes(32), "/nowhere", 0), enable_lora=False)
