"""The size of the pool after a measured step, on an imitated GPU."""

import re
from collections.abc import Sequence

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from counting_device import counting_device
from runner_steps import CONFIG, MODEL
from tiers import thinned

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout, StateTensor, kv_layout
from quire.protocol.wire.worker_messages import Ready
from quire.worker_proc.startup import setup
from quire.worker_proc.startup.measured import MARGIN
from quire.worker_proc.startup.setup import make_runner

MIB = 2**20
TOTAL = 1000 * MIB
FREE, LEFT = 900 * MIB, 850 * MIB
"""Free memory after the weights were loaded, and after a step was measured."""


def start(
    monkeypatch: pytest.MonkeyPatch, windows: Sequence[int] = (0, 0), **settings: object
) -> tuple[Ready, KVLayout]:
    model = msgspec.structs.replace(MODEL, num_layers=len(windows), windows=list(windows))
    given = {"device": "cuda", "num_blocks_override": 0, "max_num_seqs": 4, "gpu_memory_utilization": 0.95} | settings
    config: EngineConfig = msgspec.structs.replace(CONFIG, model=model, **given)
    layout = kv_layout(model, 4, "float32")
    free = iter([FREE, FREE, LEFT])
    with counting_device() as device:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (next(free), TOTAL))
        runner, ready = make_runner(config, layout)
        assert runner.batch.num_rows == 0 and "graph" not in [record.what for record in device.take()]
    return ready, layout


@pytest.mark.parametrize("windows", thinned([[0, 6], [0, 0]], keep=1), ids=str)
def test_pool_has_the_memory_that_a_step_leaves(windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ready, layout = start(monkeypatch, windows, max_num_batched_tokens=40)
    plan = ready.plan
    tried = FREE - LEFT - plan.activations
    assert tried % layout.block_bytes == 0 and tried > 0
    usable = int(0.95 * TOTAL) - (TOTAL - FREE) - plan.activations - int(MARGIN * TOTAL)
    assert plan.num_blocks == usable // layout.block_bytes == ready.num_blocks[0]
    assert plan.kv_cache == plan.num_blocks * layout.block_bytes


@pytest.mark.full
@pytest.mark.parametrize("slots", [0, 2])
def test_states_are_not_for_blocks(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer slots than requests of a step: as many requests as there are slots are measured."""
    states = [StateTensor("0", "recurrent 0", (2**18,), "float32")]
    monkeypatch.setattr(setup, "state_tensors", lambda *given: states)
    plan = start(monkeypatch, state_slots=slots)[0].plan
    assert plan.num_slots == 1 + slots or (not slots and plan.num_slots > 8)
    assert plan.states == plan.num_slots * MIB
    others = plan.activations + plan.states + int(MARGIN * TOTAL)
    assert plan.num_blocks == (int(0.95 * TOTAL) - (TOTAL - FREE) - others) * plan.num_blocks // plan.kv_cache


@pytest.mark.full
def test_next_worker_may_use_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, layout = start(monkeypatch)
    fitting = (int(0.95 * TOTAL) - (TOTAL - FREE) - ready.plan.activations) // layout.block_bytes
    assert fitting > ready.plan.num_blocks
    again, _ = start(monkeypatch, num_blocks_override=fitting - 1)
    assert again.plan.num_blocks == fitting


def test_error_names_the_measured_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    message = re.escape("measured steps and graphs 49 MiB, KV cache 830 MiB; 800 MiB are left for it")
    with pytest.raises(ConfigError, match=message):
        start(monkeypatch, kv_cache_memory_bytes=830 * MIB)
