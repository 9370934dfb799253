"""A cost model fitted to a trace's own steps recovers the cost that generated them, or rejects the trace."""

import random
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduler_driver import make_config, make_layout, make_request
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.replay.costs.fitted import FittedCost, TimedStep, fit, fit_steps
from quire.replay.costs.nonnegative import nonnegative_least_squares
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.simulated_runner import SimulatedRunner
from quire.scheduler_proc.scheduler import Scheduler
from quire.scheduler_proc.trace.decision_log import DecisionLog
from quire.scheduler_proc.trace.event_log import TraceHeader
from quire.scheduler_proc.trace.lines import End, Line, Lost, WorkerEpoch, encode_line
from quire.scheduler_proc.trace.recorder import TraceRecorder, make_immediately
from quire.scheduler_proc.trace.translate import make_header

Law = Callable[[StepShape], float]


def linear(step: StepShape) -> float:
    """Return the time for 8 GB of weights at 2 TB/s plus a linear part for tokens and context."""
    pairs = sum(n * (context + (n + 1) / 2) for n, context in step.prefills)
    prompt = step.num_tokens - step.num_decodes
    seconds = 4e-3 + 20e-6 * prompt + 3e-9 * pairs + 15e-6 * step.num_decodes + 60e-9 * step.decode_context
    return seconds + 2e-6 * step.num_samples


def roofline(step: StepShape) -> float:
    """Return the longer of the times for reading the weights and for computing the tokens."""
    return max(4e-3, 16e-6 * step.num_tokens) + 60e-9 * step.decode_context


@cache
def recorded(law: Law, num_requests: int) -> bytes:
    """Return the trace of random requests of the real Scheduler, two steps in flight, without time between steps."""
    config = make_config(async_scheduling=True, max_num_batched_tokens=512, max_num_seqs=64, max_model_len=1000)
    decision_log = DecisionLog()
    scheduler = Scheduler(config, make_layout(config), 3000, hooks=decision_log)
    lines: list[Line] = [make_header(TraceHeader(config, make_layout(config), 3000))]
    recorder = TraceRecorder(scheduler, decision_log, make_immediately(lines.append))
    runner, rng = SimulatedRunner(config), random.Random(3)
    flying: deque[ModelRunnerOutput] = deque()
    now, waiting = 0.0, num_requests
    while waiting or flying or scheduler.table.requests:
        if waiting and rng.random() < 0.2:
            waiting -= 1
            prompt = [rng.randrange(1000) for _ in range(rng.choice([5, 60, 700]))]
            request = make_request(f"r{waiting}", prompt, max_tokens=rng.randrange(1, 200), ignore_eos=True)
            scheduler.consume(request)
            recorder.consumed(now, 0, request)
        while scheduler.can_schedule:
            recorder.before_step()
            diff = scheduler.schedule(now)
            recorder.decided(now, diff)
            if diff is None:
                break
            launched = runner.launch(diff)
            flying.append(runner.finish(launched, None, law(launched.shape)))
        if flying:
            result = flying.popleft()
            now += result.seconds
            scheduler.consume(result)
            recorder.consumed(now, 0, result)
        scheduler.take_messages()
    lines.append(End(now=now, reason="stopped"))
    return b"".join(encode_line(line) + b"\n" for line in lines)


def record(path: Path, law: Law, num_requests: int = 150) -> None:
    path.write_bytes(recorded(law, num_requests))


def shapes(num: int, most_tokens: int = 512) -> list[StepShape]:
    rng = random.Random(8)
    out = []
    for _ in range(num):
        prefills = [(rng.randrange(2, most_tokens // 2), rng.randrange(0, 600)) for _ in range(rng.randrange(0, 3))]
        decodes = rng.randrange(0, 64)
        out.append(StepShape(prefills, decodes, decodes * rng.randrange(1, 800), decodes + len(prefills)))
    return [shape for shape in out if 0 < shape.num_tokens <= most_tokens]


def worst(law: Law, found: Law) -> float:
    return max(abs(found(shape) / law(shape) - 1) for shape in shapes(200))


class TestFit:
    def test_recovers_linear_cost(self, tmp_path: Path) -> None:
        record(tmp_path / "trace", linear)
        found = fit(tmp_path / "trace")
        assert worst(linear, found.seconds) < 0.01
        assert found.kv_bytes == 3000 * make_layout(make_config()).block_bytes
        assert "steps of trace; leave-one-out error: median 0.0 %, p90 0.0 %" in found.describe()

    @pytest.mark.full
    def test_recovers_kink(self, tmp_path: Path) -> None:
        record(tmp_path / "trace", roofline)
        assert worst(roofline, fit(tmp_path / "trace").seconds) < 0.05

    @pytest.mark.full
    def test_tolerates_outliers_and_noise(self, tmp_path: Path) -> None:
        rng, seen = random.Random(1), [0]

        def noisy(step: StepShape) -> float:
            seen[0] += 1
            return linear(step) * rng.gauss(1, 0.03) + (2.0 if seen[0] <= 3 or rng.random() < 0.02 else 0.0)

        record(tmp_path / "trace", noisy)
        found = fit(tmp_path / "trace")
        assert np.median([abs(found.seconds(s) / linear(s) - 1) for s in shapes(200)]) < 0.01
        assert worst(linear, found.seconds) < 0.05
        assert 0.015 < np.median(np.abs(found.errors)) < 0.03  # the noise is a lower bound

    @pytest.mark.full
    def test_ignores_steps_after_lost_lines_and_of_earlier_epochs(self, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        record(path, linear)
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*whole[: len(whole) // 2], encode_line(Lost(lines=3)), b"\n", *whole[-20:]]))
        assert 100 < len(fit(path).errors) < len(whole) // 4
        last = max(at for at, line in enumerate(whole) if b'"step_decision"' in line)
        path.write_bytes(b"".join(whole))
        before = len(fit(path).errors)
        whole.insert(last + 1, encode_line(WorkerEpoch(now=1e6)) + b"\n")
        path.write_bytes(b"".join(whole))
        assert len(fit(path).errors) < before


class TestRefusals:
    def test_rejects_trace_with_too_few_timed_steps(self, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        with pytest.raises(ConfigError, match="file not found"):
            fit(path)
        record(path, lambda step: 0.0, 10)
        with pytest.raises(ConfigError, match=r"needs 50 timed steps \(got 0\)"):
            fit(path)
        record(path, linear)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:80]))
        with pytest.raises(ConfigError, match=r"a fit needs 50 timed steps \(got \d\d?\)"):
            fit(path)

    def test_rejects_trace_with_draft_tokens(self, tmp_path: Path) -> None:
        config = make_config(num_speculative_tokens=2)
        header = make_header(TraceHeader(config, make_layout(config), 33))
        (tmp_path / "trace").write_bytes(encode_line(header) + b"\n")
        with pytest.raises(ConfigError, match="steps with draft tokens"):
            fit(tmp_path / "trace")


def test_errors_are_leave_one_out() -> None:
    rng = random.Random(2)
    steps = [TimedStep(shape, linear(shape) * rng.gauss(1, 0.02)) for shape in shapes(90)]
    coefficients, errors = fit_steps(steps)
    differences = []
    for index, (shape, seconds) in enumerate(steps[:12]):
        others, _ = fit_steps(steps[:index] + steps[index + 1 :])
        alone = _seconds(others, shape) / seconds - 1
        differences.append(abs(alone - errors[index]))
    assert np.median(differences) < 0.1 * np.median(np.abs(errors))
    known = [_seconds(coefficients, shape) / seconds - 1 for shape, seconds in steps]
    assert np.abs(errors).mean() > np.abs(known).mean()


def _seconds(coefficients: Any, shape: StepShape) -> float:
    return FittedCost(coefficients, np.zeros(1), 0, "").seconds(shape)


class TestNonNegative:
    @pytest.mark.parametrize("seed", thinned(range(20), keep=4))
    def test_satisfies_optimality_conditions(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        matrix, target = rng.normal(size=(30, 8)), rng.normal(size=30)
        found = nonnegative_least_squares(matrix, target)
        gain = matrix.T @ (target - matrix @ found)
        assert (found >= 0).all() and (gain <= 1e-8).all()
        assert np.abs(gain[found > 0]).max(initial=0.0) < 1e-8
