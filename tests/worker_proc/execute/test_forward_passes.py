"""Recorded forward passes of a CPU: the same tokens as passes that are launched call by call."""

from typing import Any

import msgspec
import pytest
import runner_steps
import torch
from runner_steps import PROMPT, Runner, adding, appending

from quire.kernels.cpu.native.library import load_native
from quire.protocol.model.model_config import MoeConfig
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.execute.device_inputs import DeviceInputs, InputSender
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.model import Inputs

pytestmark = pytest.mark.skipif(load_native() is None, reason="no C++ compiler")


def steps(runner: Runner) -> list[dict[int, int]]:
    """Run prefills, decodes of one to three rows, appended blocks and a preempted request."""
    sampling = {"temperature": 0.8, "top_p": 0.9}
    got = [runner.step(**adding((0, PROMPT, [1, 2, 3, 11, 12]), **sampling))]
    got += [runner.step() for _ in range(3)]
    got.append(runner.step(**adding((1, [8, 8], [4]), (2, [3, 3, 3], [6, 13]))))
    got += [runner.step(), runner.step(**appending(2, 0, [7, 15])), runner.step(**appending(1, 0, [5]))]
    got.append(runner.step(removed=[1]))
    got += [runner.step() for _ in range(2)]
    got.append(runner.step(**adding((3, [1, 2], [9, 10, 14]))))
    return [*got, runner.step(), runner.step()]


def eager(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Runner:
    config = msgspec.structs.replace(runner_steps.CONFIG, enforce_eager=True, **changes)
    monkeypatch.setattr(runner_steps, "CONFIG", config)
    return Runner()


def test_tokens_are_those_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Runner()
    got = steps(recorded)
    assert len(recorded.runner.passes) >= 3, "decodes of one, two and three rows"
    plain = eager(monkeypatch)
    assert steps(plain) == got
    assert len(plain.runner.passes) == 0


def test_model_with_other_operations_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8, layers=[0, 1])
    model = msgspec.structs.replace(runner_steps.MODEL, moe=moe)
    monkeypatch.setattr(runner_steps, "MODEL", model)
    monkeypatch.setattr(runner_steps, "CONFIG", msgspec.structs.replace(runner_steps.CONFIG, model=model))
    runner = Runner()
    got = steps(runner)
    assert len(runner.runner.passes) == 0
    assert steps(eager(monkeypatch)) == got


def test_code_that_is_not_quires_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "can_be_captured", False)
    runner = Runner()
    got = steps(runner)
    assert len(runner.runner.passes) == 0
    assert steps(eager(monkeypatch)) == got


def test_steps_with_given_embeddings_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded pass would compute the token ids, which are all 0 here."""
    expected, runner, made = steps(Runner()), Runner(), InputSender.of

    def of(self: InputSender, inputs: StepInputs) -> DeviceInputs:
        sent = made(self, inputs)
        ids = sent.inputs.token_ids
        given = torch.arange(len(ids)), runner.runner.forward.model.embed_tokens(ids)
        return msgspec.structs.replace(sent, inputs=Inputs(torch.zeros_like(ids), sent.inputs.positions, given))

    with monkeypatch.context() as patch:
        patch.setattr(InputSender, "of", of)
        assert steps(runner) == expected
    assert len(runner.runner.passes) == 0
    runner.step()
    assert len(runner.runner.passes) == 1
