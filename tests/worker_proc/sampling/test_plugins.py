"""Failing plugins: only the request that causes the failure fails, with a reason that reveals nothing else."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from processor_cases import VOCAB, Request
from processors_under_test import ProcessorsUnderTest

from quire.protocol.errors import ConfigError
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.sampling.processors import NOTHING_ALLOWED

INF = torch.inf


def request(output: list[int] | None = None, temperature: float = 0.0, **extra_args: Any) -> Request:
    return Request(SamplingParams(max_tokens=None, temperature=temperature, extra_args=extra_args), [5], output or [])


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.CRITICAL, "quire.worker")
    return caplog


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("raise", "logits processor Breaks failed: ZeroDivisionError"),
        ("nan", "logits processor Breaks failed: NaN or infinity"),
        ("inf", "logits processor Breaks failed: NaN or infinity"),
        ("neighbours", "logits processor Breaks failed: NaN or infinity"),
        ("shape", "logits processor Breaks failed: wrong shape of the logits"),
        ("dtype", "logits processor Breaks failed: wrong dtype of the logits"),
        ("none", "logits processor Breaks failed: result is not a tensor"),
        ("update", "logits processor Breaks failed: KeyError"),
        ("nothing", NOTHING_ALLOWED),
    ],
)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_only_the_request_that_breaks_a_plugin_fails(failure: str, reason: str, row: int, quiet: object) -> None:
    world = ProcessorsUnderTest(["Breaks", "AddText"])
    rows = [request(add_text=True) for _ in range(3)]
    rows[row] = request(**{"break": failure})
    world.add(*rows)
    logits = torch.arange(3.0 * VOCAB).reshape(3, VOCAB)
    expected = logits.clone()
    expected[:, 0] += 1.0  # by Breaks, in all rows
    expected[:, 5] += 1.0  # by AddText
    expected[row] = 0.0
    for _ in range(2):  # the second time with new instances
        edited, failed = world.apply(logits)
        assert failed.keys() == {row} and failed[row].startswith(reason)
        assert torch.equal(edited, expected)
    assert "Breaks" in [
        type(processor).__name__ for processor in world.processors.all
    ]  # an instance for the other rows


@pytest.mark.parametrize("failure", ["raise", "forget"])
def test_other_requests_continue_after_the_failing_one_is_removed(failure: str, quiet: object) -> None:
    """They continue even if the instance that raised has lost its state."""
    world = ProcessorsUnderTest(["Breaks", "AddText"])
    world.add(request(**{"break": failure}), request(add_text=True), request(**{"break": "update"}), request())
    assert set(world.apply(torch.zeros(4, VOCAB))[1]) == {0, 2}
    world.change([0, 2], {9: request(add_text=True)})
    world.sampled(world.everyone, [7] * world.batch.num_rows)
    edited, failed = world.apply(torch.zeros(3, VOCAB))
    assert failed == {}
    for row in range(3):
        adds = "add_text" in world.request_in(row).params.extra_args
        assert edited[row, [0, 5, 7]].tolist() == [1.0, float(adds), float(adds)]


def test_failure_after_a_rejected_draft_fails_only_that_position(quiet: object) -> None:
    """Whether a request fails must not depend on the proposer of drafts."""
    world = ProcessorsUnderTest(["Breaks"])
    world.add(request(**{"break": "raise", "from": 1}), request())
    positions = SampledPositions.with_drafts(np.array([0, 1]), [[4], [4]])
    failures = world.edit(torch.zeros(4, VOCAB), positions, None)
    assert failures == [(1, "logits processor Breaks failed: ZeroDivisionError")]
    world.sampled(positions, [3, 0, 4, 4])
    assert [len(world.request_in(row).output) for row in range(2)] == [1, 2]


def test_row_with_nan_logits_is_not_a_plugin_failure(quiet: pytest.LogCaptureFixture) -> None:
    world = ProcessorsUnderTest(["Breaks"])
    world.add(request(), request())
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = torch.nan
    edited, failed = world.apply(logits)
    assert failed == {} and edited[1, 0] == 1.0
    assert torch.isnan(edited[0]).any()


def test_plugin_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = ProcessorsUnderTest(["Breaks"])
    world.add(request(**{"break": "raise"}))
    world.apply(torch.zeros(1, VOCAB))
    assert "logits processor failed name=Breaks" in caplog.text and "/home/secret" in caplog.text


def test_plugin_with_a_failing_constructor_is_an_error_at_start() -> None:
    with pytest.raises(
        ConfigError, match="logits processor RefusesToServe: constructor failed: OSError: no model of mine"
    ):
        ProcessorsUnderTest(["RefusesToServe"])


def test_output_lists_are_complete_when_a_plugin_is_applied() -> None:
    """The lists contain drafts during ``apply``, and not afterwards."""
    world = ProcessorsUnderTest(["Lengths"])
    world.add(request(name="a"), request([5, 5], name="b"))
    world.apply(torch.zeros(2, VOCAB))
    world.sampled(world.everyone, [1, 2])
    positions = SampledPositions.with_drafts(np.array([0, 1]), [[4, 4], [6]])
    world.edit(torch.zeros(5, VOCAB), positions, None)
    world.batch.check()
    world.sampled(positions, [4, 9, 9, 6, 9])
    world.apply(torch.zeros(2, VOCAB))
    (lengths,) = [p for p in world.processors.all if type(p).__name__ == "Lengths"]
    assert lengths.seen == {"a": [0, 1, 2, 3, 3], "b": [2, 3, 4, 4, 5]}  # type: ignore[attr-defined]


def test_rows_without_positions_are_in_the_plugins_batch() -> None:
    world = ProcessorsUnderTest(["AddText"])
    world.add(request(), request(add_text=True), request())
    logits = torch.zeros(1, VOCAB)
    assert world.edit(logits, SampledPositions.one_per_row(np.array([1])), None) == []
    assert logits[0, 5] == 1.0 and logits.sum() == 1.0


def test_argmax_invariant_plugins_are_applied_separately() -> None:
    world = ProcessorsUnderTest(["Halve"])
    world.add(request(halve=True), request(temperature=0.5, halve=True), request(temperature=0.5))
    edited, failed = world.apply(torch.ones(3, VOCAB))
    assert (edited == 1).all() and failed == {}
    random_rows = torch.ones(2, VOCAB)
    some = SampledPositions.one_per_row(np.array([1, 2]))
    assert world.processors.apply_argmax_invariant(random_rows, some) == []
    assert (random_rows[0] == 0.5).all() and (random_rows[1] == 1).all()


def test_plugin_is_active_while_a_request_uses_it() -> None:
    """``Halve`` answers by ``uses``; an adapter by the callable that it has for the request or has not."""
    world = ProcessorsUnderTest(["Halve", "Prefers"])
    world.add(request(), request())
    assert not world.processors.active and world.batch.outputs.num_kept == 0
    world.add(request(halve=True))
    assert world.processors.active and world.processors.has_argmax_invariant and world.processors.needs_history
    assert world.batch.outputs.num_kept == 1
    world.change([2], {5: request(prefers=3)})
    assert world.processors.active and not world.processors.has_argmax_invariant
    world.change([5], {})
    assert not world.processors.active and not world.processors.needs_history
    world.add(request(halve=True))
    world.processors.reset()
    assert not world.processors.active
