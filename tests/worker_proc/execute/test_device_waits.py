"""Copies and waits of each kind of step on a GPU that counts: one copy in, one copy out, and no other wait."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapters import make_adapter

pytest.importorskip("triton", reason="triton is not installed")

from counting_device import CountingDevice, Record, counting_device
from runner_steps import CONFIG, MODEL, adding
from tiers import thinned

from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.wire.side_rows import SIDE_KINDS
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SampleInputs, SchedulerOutput
from quire.worker_proc.adapters.packed import pack_adapter
from quire.worker_proc.attention import triton_backend
from quire.worker_proc.batch import shared_prefixes
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.execute.device_inputs import DeviceInputs, InputSender
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.execute.pending_result import HostCopies, HostCopy
from quire.worker_proc.parallel.group import SingleRank, TensorParallel
from quire.worker_proc.startup.setup import make_runner

WORDS = -(-MODEL.vocab_size // 32)
ONE_GROUP, TWO_GROUPS, SEVEN_GROUPS = [0, 0], [0, 6], [6, 6, 6, 6, 6, 6, 0]


class TwoRanks(SingleRank):
    """Rank 0 of a group of two whose other rank holds zeros."""

    size = 2

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=1)


class Counted:
    """A ModelRunner on the counting device, whose steps are given as keywords."""

    def __init__(
        self, device: CountingDevice, windows: list[int], group: TensorParallel | None = None, **settings: Any
    ) -> None:
        size = 1 if group is None else group.size
        model: ModelConfig = msgspec.structs.replace(MODEL, num_layers=len(windows), windows=windows)
        settings = {"device": "cuda", "max_num_seqs": 4, "tensor_parallel_size": size} | settings
        config: EngineConfig = msgspec.structs.replace(CONFIG, model=model, **settings)
        layout = kv_layout(model, 4, "float32")
        self.num_groups = len(layout.groups)
        self.runner: ModelRunner = make_runner(config, layout, group=group or SingleRank(), progress=False)[0]
        self.runner.warm_up()
        self.device, self.steps = device, 0
        device.take()

    def step(self, inputs: SampleInputs | None = None, **fields: Any) -> tuple[list[Record], ModelRunnerOutput]:
        """Return what launch and finish asked of the device, and the result, which must not ask for anything."""
        self.steps += 1
        step = SchedulerOutput(self.steps, awaits_sample_inputs=inputs is not None, **fields)
        pending = self.runner.finish(self.runner.launch(step), inputs)
        records = self.device.take()
        self.device.finish()
        result = pending.result()
        assert self.device.take() == [], "reading a finished result asks something of the device"
        return records, result

    def add(self, *rows: tuple[int, list[int], list[int]], **sampling: Any) -> dict[str, Any]:
        """Return fields of a step that adds (handle, tokens, blocks of the first group)."""
        fields = adding(*rows, **sampling)
        groups = range(self.num_groups)
        new = [msgspec.structs.replace(new, num_blocks=new.num_blocks * len(groups)) for new in fields["new_requests"]]
        blocks = [block + 7 * group for _, _, own in rows for group in groups for block in own]
        return fields | {"new_requests": new, "block_ids": np.array(blocks, np.int32)}


@contextmanager
def counted(windows: list[int] = ONE_GROUP, **settings: Any) -> Iterator[Counted]:
    with counting_device() as device:
        yield Counted(device, windows, num_blocks_override=60, **settings)


def require(records: list[Record], copies_in: int = 1, copies_out: int = 1) -> None:
    """Check that a step made these copies and no wait."""
    waits = [str(record) for record in records if record.kind in ("wait", "event")]
    assert waits == []
    kinds = [record.kind for record in records]
    assert (kinds.count("copy in"), kinds.count("copy out")) == (copies_in, copies_out), [
        str(record) for record in records if record.kind.startswith("copy")
    ]


def num_launches(num_layers: int) -> int:
    """Return the launches of a mixed step, of kernels and of torch's operations."""
    with counted([0] * num_layers) as runner:
        runner.step(**runner.add(*ROWS))
        records, _ = runner.step(**runner.add((2, [3, 1, 4], [6, 7])))
    return sum(record.kind in ("launch", "operation") for record in records)


def test_launches_of_a_mixed_step() -> None:
    """Each launch costs the host 5 to 10 µs."""
    one, three = num_launches(1), num_launches(3)
    per_layer = (three - one) / 2
    assert per_layer <= 10 and one - per_layer <= 40


ROWS = (0, [5, 9, 2, 7, 7, 1], [1, 2, 3]), (1, [8, 8], [4, 5])


@pytest.mark.parametrize("windows", thinned([TWO_GROUPS, ONE_GROUP, SEVEN_GROUPS], keep=1), ids=str)
def test_prefill_mixed_and_steady_steps(windows: list[int]) -> None:
    with counted(windows) as runner:
        require(runner.step(**runner.add(*ROWS))[0])
        require(runner.step()[0])  # the first steady step sends the columns of all rows
        require(runner.step()[0], copies_in=0)
        require(runner.step(**runner.add((2, [3, 1, 4], [6, 7])))[0])
        require(runner.step(parked=[1])[0])
        require(runner.step(removed=[0])[0])


@pytest.mark.full
def test_mixed_step_of_rows_with_a_common_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_KEYS", 4)
    monkeypatch.setattr(triton_backend, "MIN_SHARED_READS", 1)
    with counted() as runner:
        require(runner.step(**runner.add((0, [5, 9, 2, 7, 7, 1], [1, 2, 3])))[0])
        plain = runner.step(**runner.add((1, [3, 3], [4, 5])))[0]
        records = runner.step(**runner.add((2, [5, 9, 2, 7, 6, 8], [1, 6, 7]), computed=4), removed=[1])[0]
        require(records)
        assert sum(r.kind == "launch" for r in records) > sum(r.kind == "launch" for r in plain)
        require(runner.step()[0])


@pytest.mark.full
@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 3, "top_p": 0.9},
        {"logprobs": 2},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}, "min_tokens": 4, "bad_words_token_ids": [[3]], "allowed_token_ids": [1, 2, 3]},
    ],
    ids=lambda sampling: ", ".join(sampling),
)
def test_sampling_parameters(sampling: dict[str, Any]) -> None:
    """Rows change in the third step; the steps before and after it are steady."""
    with counted() as runner:
        records, result = runner.step(**runner.add(*ROWS, temperature=0.8, **sampling))
        require(records)
        assert {"logprobs", "prompt_logprobs"} & {*sampling} == {SIDE_KINDS[rows.kind].field for rows in result.side}
        for _ in range(2):
            require(runner.step()[0])
        require(runner.step(**runner.add((2, [3, 1, 4], [6, 7]), temperature=0.8, **sampling))[0])
        require(runner.step()[0])


@pytest.mark.full
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probability_modes(mode: str) -> None:
    with counted(logprobs_mode=mode) as runner:
        require(runner.step(**runner.add(*ROWS, logprobs=1, temperature=0.7, top_k=5))[0])
        require(runner.step()[0])


@pytest.mark.full
def test_token_bitmasks_arrive_later_and_are_copied_on_their_own() -> None:
    with counted() as runner:
        masks = SampleInputs(1, [0], [1], np.full(WORDS, -1, np.int32))
        require(runner.step(masks, **runner.add(*ROWS))[0], copies_in=2)
        require(runner.step(SampleInputs(2, [0], [1], np.full(WORDS, -1, np.int32)))[0], copies_in=2)


@pytest.mark.full
def test_drafts_wait_for_their_own_result_alone() -> None:
    """The next step needs the number of accepted drafts."""
    with counted(num_speculative_tokens=2, speculative=SpeculativeConfig(method="ngram")) as runner:
        runner.step(**runner.add((0, [0] * 5, [1, 2, 3]), (1, [8, 8], [4, 5])))
        records, _ = runner.step(drafts=[(0, 2)], counts=[(0, 3)])
        assert [record.kind for record in records if record.kind != "operation"][-1] == "event"
        require([record for record in records if record.kind != "event"])
        assert "graph" in [record.what for record in records]  # the forward pass, also with one row without drafts
        runner.runner._proposer.propose = lambda wanted: {}  # type: ignore[union-attr,method-assign]
        records, _ = runner.step(drafts=[(0, 2)], counts=[(0, 3)])
        require(records)
        assert "graph" in [record.what for record in records]  # and when none were found
        added = runner.add((2, [3, 1, 4], [6, 7]))
        records, _ = runner.step(**added | {"drafts": [(0, 2)], "counts": [(0, 3), *added["counts"]]})
        assert "graph" not in [record.what for record in records]


@pytest.mark.full
def test_plugin_that_no_request_uses_leaves_the_steps_as_they_are() -> None:
    with counted(logits_processors=["processor_plugins:Halve"]) as runner:
        require(runner.step(**runner.add(*ROWS))[0])
        require(runner.step()[0])
        records, _ = runner.step()
        require(records, copies_in=0)
        assert [record.what for record in records if record.kind == "launch"] == ["graph"]


@pytest.mark.full
def test_adapters_are_captured_in_graphs_of_their_own(tmp_path: Path) -> None:
    """The slots of the tokens are part of the step's one copy, and are sent only if they have changed."""
    with counted(enable_lora=True, max_loras=2) as runner:
        slots = runner.runner.adapters
        assert slots is not None
        folder = make_adapter(tmp_path / "a", runner.runner.forward.model.config)
        slots.fill(1, pack_adapter(read_adapter(folder, MODEL, 64), slots.sites))
        slots.occupy(1, 7)
        runner.device.take()
        fields = runner.add(*ROWS)
        fields["new_requests"][1] = msgspec.structs.replace(fields["new_requests"][1], adapter=7)
        records, _ = runner.step(**fields)
        require(records)
        assert sum(record.what == "shrink_kernel" for record in records) == 4 * 2  # sites of each of the layers
        require(runner.step()[0])
        records, _ = runner.step()
        require(records, copies_in=0)
        assert [record.what for record in records if record.kind == "launch"] == ["graph"]
        require(runner.step(removed=[1])[0])
        records, _ = runner.step()
        require(records, copies_in=0)
        graphs = runner.runner.steady.graphs  # type: ignore[union-attr]
        assert len(graphs._decode) == 2 * 2 * len(graphs._sizes)


@pytest.mark.full
def test_two_ranks() -> None:
    with counted(group=TwoRanks()) as runner:
        require(runner.step(**runner.add(*ROWS))[0])
        require(runner.step()[0])
        require(runner.step()[0], copies_in=0)


# ---- the device notices the waits that this code once had


def _with_inputs(change: Callable[[DeviceInputs], dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    made = InputSender.of

    def of(self: InputSender, inputs: StepInputs) -> DeviceInputs:
        sent = made(self, inputs)
        return msgspec.structs.replace(sent, **change(sent))

    return lambda monkeypatch: monkeypatch.setattr(InputSender, "of", of)


def _results_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HostCopies, "start", lambda self, tensors, memory=None: HostCopy([tensor.cpu() for tensor in tensors], None)
    )


FAULTS = {
    "kernels/attention/attention_plan.py": _with_inputs(  # planned in the first layer
        lambda sent: {
            "batches": [dataclasses.replace(batch, layer_shapes=(), send=None) for batch in sent.batches],
        }
    ),
    "worker_proc/execute/forward_passes.py": _with_inputs(lambda _: {"sampled_tokens": torch.tensor([0, 1])}),
    "worker_proc/execute/model_runner.py _advance": _with_inputs(lambda _: {"sampled_rows": torch.tensor([0, 1])}),
    "worker_proc/execute/model_runner.py": _results_read_at_once,
}
"""Line that waits → the fault."""


def test_notices_a_wait() -> None:
    with counted() as runner:
        for number, (line, fault) in enumerate(FAULTS.items()):
            with pytest.MonkeyPatch.context() as monkeypatch:
                fault(monkeypatch)
                removed = [0, 1] if number else []
                records, _ = runner.step(**runner.add(*ROWS), removed=removed)
            waits = [record for record in records if record.kind == "wait"]
            assert waits and waits[0].line.startswith(line.split()[0])
