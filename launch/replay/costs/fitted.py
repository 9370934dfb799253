"""How long steps take, learnt from the steps of a Quire trace that were timed."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.launch.replay.costs.nonnegative import Floats, nonnegative_least_squares
from quire.launch.replay.costs.rows import SimulatedRows
from quire.launch.replay.recorded.reader import TraceLine, TraceReader
from quire.launch.replay.run.step_shape import StepShape
from quire.protocol.errors import ConfigError
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.scheduler_proc.trace.lines import Keyframe, Lost, Result, StepDecision, WorkerEpoch

LEAST_STEPS = 50
MOST_STEPS = 50_000
"""Of a longer trace as many, evenly spread, are fitted to."""
KNEES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""From so many tokens of a step on, each further one may cost more: where compute takes over from memory."""
ROUNDS = 20
LEAST_SHARE = 0.01
"""A fit is never taken to expect less than this share of what a step took: it is divided by."""
HUBER = 2.0
"""Errors beyond so many standard deviations count by their size, not by their square."""


class TimedStep(NamedTuple):
    shape: StepShape
    seconds: float


class FittedCost:
    """A sum of non-negative parts, each proportional to one number of a step.

    The parts: the step itself; prompt tokens; pairs of prompt tokens and the tokens that they attend to; tokens of
    those that decode; tokens that these attend to; rows that sample; and tokens of the step beyond each of ``KNEES``.

    Attributes:
        coefficients: float64 ``[6 + len(KNEES)]``: seconds per unit of each part.
        errors: float64: what each step that was fitted to would have been off by, as a share of its time, had the
            fit not known it.
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
    """From the timed steps of the trace at ``path``.

    Raises:
        ConfigError: no readable trace, or too few timed steps in it.
    """
    reader = TraceReader(path)
    config, layout = reader.header.config, reader.header.kv_layout
    if config.num_speculative_tokens:
        raise ConfigError(f"{path}: steps with drafts cannot be fitted to; record without --speculative-config")
    steps = timed_steps(reader)
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"{path} has {len(steps)} timed steps; a fit needs {LEAST_STEPS}")
    coefficients, errors = fit_steps(steps)
    return FittedCost(coefficients, errors, reader.header.num_blocks * layout.block_bytes, path.name)


def timed_steps(trace: Iterable[TraceLine]) -> list[TimedStep]:
    """Steps that the worker timed, up to the first lines that are lost.

    A step's time is from when it could begin (it was decided, and the one before was answered) to its answer: what the
    worker says of it, and what the processes took to tell each other, for a simulation has nothing else for that.
    Steps that waited for masks are left out: they waited for the scheduler.

    Raises:
        ConfigError: a step names a request that is not there.
    """
    rows = SimulatedRows()
    shapes: dict[int, tuple[StepShape, float]] = {}
    answered = float("-inf")
    timed: list[TimedStep] = []
    for told in trace:
        match told.line:
            case StepDecision() as decision:
                try:
                    shape = rows.apply(_as_diff(decision))
                except KeyError as error:
                    raise ConfigError(f"{told.file}: line {told.number} names request {error}, unknown there") from None
                if not decision.awaits_sample_inputs:
                    shapes[decision.step] = shape, decision.now
            case Result(step=step, seconds=seconds, now=now):
                found = shapes.pop(step, None)
                if found is not None and seconds > 0:
                    timed.append(TimedStep(found[0], max(seconds, now - max(answered, found[1]))))
                answered = now
            case WorkerEpoch():
                shapes.clear()
            case Keyframe(state=state):
                rows.hold(state.removed)
            case Lost():
                break
            case _:
                pass
    return timed


def _as_diff(decision: StepDecision) -> SchedulerOutput:
    """As much of the diff as says what the step computes."""
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
    """Coefficients, and the error of each fitted step by all the others; both as FittedCost has them.

    What counts of an error is its share of the step's time as the fit has it, so that short steps are met as well as
    long ones. (As a share of the time that was measured, being too high would count for more than being too low.)
    Steps that took oddly long (the first ones: kernels are compiled) hardly count, by Huber's weights.
    """
    if len(steps) > MOST_STEPS:
        chosen = np.linspace(0, len(steps) - 1, MOST_STEPS).astype(int)
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
        expected = np.maximum(found, LEAST_SHARE * seconds)
        weights = _huber_weights((found - seconds) / expected, has_prefill)
    pull = _pull(parts[:, solution > 0] * root[:, None])
    return solution / np.where(units > 0, units, 1.0), (found - seconds) / (1.0 - pull) / seconds


def _parts(shape: StepShape) -> list[float]:
    num_tokens = shape.num_tokens
    pairs = sum(tokens * (context + (tokens + 1) / 2) for tokens, context in shape.prefills)
    linear = [1.0, num_tokens - shape.num_decodes, pairs, shape.num_decodes, shape.decode_context, shape.num_samples]
    return [*linear, *(max(0, num_tokens - knee) for knee in KNEES)]


def _huber_weights(errors: Floats, has_prefill: npt.NDArray[np.bool_]) -> Floats:
    """``[steps]``. Each kind of step has its own spread: where few steps have prefill, these would be the odd ones."""
    weights = np.ones(len(errors))
    for kind in (has_prefill, ~has_prefill):
        if kind.any():
            sizes = np.abs(errors[kind])
            limit = max(HUBER * 1.4826 * float(np.median(sizes)), 1e-6)
            weights[kind] = np.minimum(1.0, limit / np.maximum(sizes, 1e-12))
    return weights


def _pull(parts: Floats) -> Floats:
    """``[steps]``: how far each step moves the fit to itself, from 0 to below 1 (the diagonal of the hat matrix). Its
    error without it would be ``1 / (1 - pull)`` times as large."""
    orthogonal, _ = np.linalg.qr(parts)
    pull: Floats = (orthogonal**2).sum(axis=1)
    return np.minimum(pull, 1.0 - 1e-9)
