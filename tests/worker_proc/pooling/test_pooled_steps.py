"""Copies and waits of steps with pooled rows, on a GPU that counts, and what such steps leave out."""

from typing import Any

import msgspec
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from counting_device import counting_device
from runner_steps import CONFIG, MODEL, adding
from tiers import thinned

from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.worker_messages import SchedulerOutput
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.startup.setup import make_runner

EMBED = PoolingConfig(tasks=["embed", "token_embed"], size=MODEL.hidden_size)
LABELS = PoolingConfig(tasks=["classify"], size=MODEL.hidden_size, labels=["a", "b"], activation="softmax")
YES_NO = PoolingConfig(
    tasks=["classify"], size=MODEL.hidden_size, labels=["a"], activation="sigmoid", label_token_ids=[3, 4]
)
CASES: dict[str, tuple[PoolingConfig, bool, list[PoolingParams]]] = {
    "last": (EMBED, True, [PoolingParams(), PoolingParams(dimensions=4), PoolingParams("token_embed")]),
    "mean": (msgspec.structs.replace(EMBED, pooling="mean"), True, [PoolingParams()] * 3),
    "cls": (msgspec.structs.replace(EMBED, pooling="cls"), False, [PoolingParams()] * 3),
    "labels": (LABELS, False, [PoolingParams("classify")] * 3),
    "yes or no": (YES_NO, True, [PoolingParams("classify")] * 3),
}
ROWS = (0, [5, 9, 2, 7, 7, 1], [1, 2, 3]), (1, [8, 8], [4, 5]), (2, [3], [6])


def pooled(params: list[PoolingParams]) -> dict[str, Any]:
    """Return fields of a step that adds a request for each of ``params``, and computes part of the first prompt."""
    fields = adding(*ROWS)
    new = [msgspec.structs.replace(new, pooling=own) for new, own in zip(fields["new_requests"], params, strict=True)]
    return fields | {"new_requests": new, "counts": [(0, 4), (1, 2)]}


@pytest.mark.parametrize("name", thinned(CASES, keep=2))
def test_one_copy_in_one_copy_out_and_no_wait(name: str) -> None:
    pooling, generates, params = CASES[name]
    model = msgspec.structs.replace(MODEL, pooling=pooling, generates=generates)
    config = msgspec.structs.replace(CONFIG, model=model, device="cuda", max_num_seqs=4)
    with counting_device() as device:
        runner: ModelRunner = make_runner(config, kv_layout(model, 4, "float32"), progress=False)[0]
        runner.warm_up()
        assert (runner.steady is not None) == generates
        steps = [
            pooled(params),
            {"removed": [1, 2], "counts": [(0, 2)]}
            | (adding((3, [4, 4], [7])) | {"counts": [(0, 2), (3, 2)]} if generates else {}),
        ]
        device.take()
        for number, fields in enumerate(steps, 1):
            pending = runner.finish(runner.launch(SchedulerOutput(number, **fields)))
            records = device.take()
            assert [str(record) for record in records if record.kind in ("wait", "event")] == []
            kinds = [record.kind for record in records]
            assert (kinds.count("copy in"), kinds.count("copy out")) == (1, 1)
            device.finish()
            result = pending.result()
            tokens = [] if result.tokens is None else result.tokens.tolist()
            assert len(tokens) == (number == 2 and generates)
            assert sorted(result.side[0].handles) == {1: [1, 2], 2: [0]}[number]


@pytest.mark.full
def test_a_step_with_the_last_token_of_a_prompt_is_not_steady() -> None:
    model = msgspec.structs.replace(MODEL, pooling=EMBED)
    config = msgspec.structs.replace(CONFIG, model=model, device="cuda", max_num_seqs=4)
    with counting_device() as device:
        runner: ModelRunner = make_runner(config, kv_layout(model, 4, "float32"), progress=False)[0]
        runner.execute(SchedulerOutput(1, **adding((0, [5, 9], [1]))))
        fields = adding((1, [8], [2]))
        new = [msgspec.structs.replace(fields["new_requests"][0], pooling=PoolingParams())]
        launched = runner.launch(SchedulerOutput(2, **fields | {"new_requests": new}))
        assert not launched.steady and launched.positions.rows.tolist() == [0]
        runner.finish(launched)
        assert runner.launch(SchedulerOutput(3, removed=[1])).steady
        device.finish()
