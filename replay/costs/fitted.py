"""A cost model fitted to the timed steps of a Quire trace."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.protocol.errors import ConfigError
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.replay.costs.nonnegative import Floats, nonnegative_least_squares
from quire.replay.costs.rows import SimulatedRows
from quire.replay.recorded.reader import TraceLine, TraceReader
from quire.replay.run.step_shape import StepShape
from quire.scheduler_proc.trace.lines import Header, Keyframe, Lost, Result, StepDecision, WorkerEpoch

MIN_STEPS = 50
MAX_STEPS = 50_000
"""Number of steps, evenly spaced, that are used of a longer trace."""
KNEES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens above which a further token may cost more: where compute becomes the bottleneck, not memory."""
ROUNDS = 20
MIN_SHARE = 0.01
"""Lower bound of an expected time as a share of the measured one, because errors are divided by the expected time."""
HUBER = 2.0
"""Number of standard deviations above which an error counts linearly, not squared."""


class TimedStep(NamedTuple):
    shape: StepShape
    seconds: float


class FittedCost:
    """A sum of non-negative parts, each proportional to one number of a step.

    The parts: the step itself; prefill tokens; (query, key) pairs of prefills; decode tokens; tokens that decodes
    attend to; sampling rows; and the step's tokens beyond each of ``KNEES``.

    Attributes:
        coefficients: float64 ``[6 + len(KNEES)]``: seconds per unit of each part.
        errors: float64 ``[steps]``: leave-one-out error of each fitted step, relative to its measured time.
    """

    def __init__(self, coefficients: Floats, errors: Floats, kv_bytes: int, source: str) -> None:
        self.coefficients = coefficients
        self.errors = errors
        self._kv_bytes = kv_bytes
        self._source = source
        linear = [float(c) for c in coefficients[:6]]
        self._base, self._prefill, self._pairs, self._decode, self._context, self._sample = linear
        beyond = zip(KNEES, coefficients[6:].tolist(), strict=True)
        self._beyond = [(knee, seconds) for knee, seconds in beyond if seconds]

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes

    def seconds(self, step: StepShape) -> float:
        total = self._base + self._decode * step.num_decodes + self._context * step.decode_context
        total += self._sample * step.num_samples
        if step.prefills:
            for tokens, context in step.prefills:
                total += tokens * (self._prefill + self._pairs * (context + (tokens + 1) / 2))
        num_tokens = step.num_tokens
        for knee, seconds in self._beyond:
            if num_tokens > knee:
                total += seconds * (num_tokens - knee)
        return total

    def describe(self) -> str:
        median, most = (100 * float(np.quantile(np.abs(self.errors), q)) for q in (0.5, 0.9))
        return (
            f"fitted to {len(self.errors)} steps of {self._source}; "
            f"leave-one-out error: median {median:.1f} %, p90 {most:.1f} %"
        )


def fit(path: Path) -> FittedCost:
    """Fit a cost model to the timed steps of the trace at ``path``.

    Raises:
        ConfigError: an unreadable trace, speculative decoding, or too few timed steps.
    """
    reader = TraceReader(path)
    config, layout = reader.header.config, reader.header.kv_layout
    if config.num_speculative_tokens:
        raise ConfigError(f"{path}: cannot fit to steps with draft tokens: record without --speculative-config")
    steps = timed_steps(reader)
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{path}: a fit needs {MIN_STEPS} timed steps (got {len(steps)})")
    coefficients, errors = fit_steps(steps)
    return FittedCost(coefficients, errors, reader.header.num_blocks * layout.block_bytes, path.name)


def timed_steps(trace: Iterable[TraceLine]) -> list[TimedStep]:
    """Return the steps with a measured time, up to the first lost line.

    A step's time is from when it could begin (it was scheduled and the previous result had arrived) to its own result.
    It includes the worker's time and the communication between the processes, which a simulation does not model
    separately. Steps that waited for grammar masks are skipped, because they waited for the scheduler.

    Raises:
        ConfigError: a step names an unknown request.
    """
    rows = SimulatedRows()
    shapes: dict[int, tuple[StepShape, float]] = {}
    answered = float("-inf")
    timed: list[TimedStep] = []
    for entry in trace:
        match entry.line:
            case StepDecision() as decision:
                try:
                    shape = rows.apply(_as_diff(decision))
                except KeyError as error:
                    raise ConfigError(f"{entry.file}:{entry.number}: unknown request handle {error}") from None
                if not decision.awaits_sample_inputs:
                    shapes[decision.step] = shape, decision.now
            case Result(step=step, seconds=seconds, now=now):
                found = shapes.pop(step, None)
                if found is not None and seconds > 0:
                    timed.append(TimedStep(found[0], max(seconds, now - max(answered, found[1]))))
                answered = now
            case WorkerEpoch():
                shapes.clear()
            case Header(restarted=True):
                rows = SimulatedRows()
                shapes.clear()
            case Keyframe(num_requests=num_requests, removed=removed):
                if num_requests:
                    raise ConfigError(
                        f"{entry.file}: cannot fit to a trace that begins while requests run: give --cost"
                    )
                rows.hold(removed)
            case Lost():
                break
            case _:
                pass
    return timed


def _as_diff(decision: StepDecision) -> SchedulerOutput:
    """Convert a decision to a diff with only the fields that determine the step's shape."""
    new = [
        NewRequestData(
            row.handle, "", row.num_prompt_tokens, row.num_tokens, row.num_computed_tokens, [], SamplingParams(), 0
        )
        for row in decision.new
    ]
    return SchedulerOutput(
        decision.step,
        removed=decision.removed,
        parked=decision.parked,
        unparked=decision.unparked,
        new_requests=new,
        counts=decision.counts,
    )


def fit_steps(steps: list[TimedStep]) -> tuple[Floats, Floats]:
    """Return FittedCost's ``coefficients`` and ``errors``.

    Errors are minimised relative to the fitted time, so that short steps fit as well as long ones. (Relative to the
    measured time, an estimate that is too high would weigh more than one that is too low.) Huber weights make unusually
    slow steps, such as the first ones, in which kernels are compiled, count little.
    """
    if len(steps) > MAX_STEPS:
        chosen = np.linspace(0, len(steps) - 1, MAX_STEPS).astype(int)
        steps = [steps[index] for index in chosen]
    seconds = np.array([step.seconds for step in steps])
    parts = np.array([_parts(step.shape) for step in steps])
    units = np.abs(parts).max(axis=0)
    parts /= np.where(units > 0, units, 1.0)
    has_prefill = np.array([bool(step.shape.prefills) for step in steps])
    expected, weights = seconds, np.ones(len(steps))
    for _ in range(ROUNDS):
        root = np.sqrt(weights) / expected
        solution = nonnegative_least_squares(parts * root[:, None], seconds * root)
        found = parts @ solution
        expected = np.maximum(found, MIN_SHARE * seconds)
        weights = _huber_weights((found - seconds) / expected, has_prefill)
    leverage = _leverage(parts[:, solution > 0] * root[:, None])
    return solution / np.where(units > 0, units, 1.0), (found - seconds) / (1.0 - leverage) / seconds


def _parts(shape: StepShape) -> list[float]:
    num_tokens = shape.num_tokens
    pairs = sum(tokens * (context + (tokens + 1) / 2) for tokens, context in shape.prefills)
    linear = [1.0, num_tokens - shape.num_decodes, pairs, shape.num_decodes, shape.decode_context, shape.num_samples]
    return [*linear, *(max(0, num_tokens - knee) for knee in KNEES)]


def _huber_weights(errors: Floats, has_prefill: npt.NDArray[np.bool_]) -> Floats:
    """Return weights ``[steps]``, scaled separately for steps with and without prefill.

    With a common scale, the rarer kind would count as outliers.
    """
    weights = np.ones(len(errors))
    for kind in (has_prefill, ~has_prefill):
        if kind.any():
            sizes = np.abs(errors[kind])
            limit = max(HUBER * 1.4826 * float(np.median(sizes)), 1e-6)
            weights[kind] = np.minimum(1.0, limit / np.maximum(sizes, 1e-12))
    return weights


def _leverage(parts: Floats) -> Floats:
    """Return the leverage ``[steps]`` of each step, in [0, 1): the diagonal of the hat matrix.

    The step's leave-one-out error is ``1 / (1 - leverage)`` times its error.
    """
    orthogonal, _ = np.linalg.qr(parts)
    leverage: Floats = (orthogonal**2).sum(axis=1)
    return np.minimum(leverage, 1.0 - 1e-9)
