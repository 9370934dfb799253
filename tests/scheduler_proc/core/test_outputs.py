"""Messages to front ends when several results are applied before they are taken."""

import numpy as np
from fake_worker import logprob_rows
from scheduler_driver import Driver
from side_parts import side_rows

from quire.protocol.wire.front_end_messages import StepOutputs
from quire.protocol.wire.side_rows import LOGPROBS
from quire.protocol.wire.worker_messages import ModelRunnerOutput


def result(step: int, handle: int, token: int, logprob: float) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        step=step,
        tokens=np.array([token], np.int32),
        handles=np.array([handle], np.int32),
        side=[side_rows(LOGPROBS, (handle, 0, logprob_rows([[(token, logprob)]])))],
    )


def test_each_token_has_the_logprob_of_its_step() -> None:
    """With two steps in flight, two results can be applied before messages are sent."""
    driver = Driver(async_scheduling=True)
    driver.add("a", [3, 4, 5], max_tokens=4, logprobs=0)
    driver.schedule()
    driver.schedule()
    handle = driver.request("a").handle
    driver.scheduler.consume(result(1, handle, 5, -0.5))
    driver.scheduler.consume(result(2, handle, 6, -0.25))
    outputs = [message for _, message in driver.scheduler.take_messages() if isinstance(message, StepOutputs)]
    assert [message.tokens.tolist() for message in outputs if message.tokens is not None] == [[5], [6]]
    assert [rows.floats[0].tolist() for message in outputs for rows in message.side] == [[-0.5], [-0.25]]
