"""State of a step between its forward pass and its sampling."""

from dataclasses import dataclass

import torch

from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.execute.step_extras import NO_EXTRAS, StepExtras
from quire.worker_proc.sampling.sampler import SampledTokens


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward pass is launched, up to its sampling.

    Attributes:
        began: launch time, by ``time.perf_counter``.
        positions: the positions to sample.
        inputs: the model's inputs; None for a steady decode step.
        sampled_rows: int64 ``[num_positions]`` on the device: rows whose newest token is the sampled one, if no row
            has draft tokens; None for a steady decode step, which stores it itself.
        logits: float32 ``[num_positions, vocab]``; None if nothing is sampled, or if ``sampled`` is set.
        sampled: tokens that the step's graph has sampled already.
        steady: whether it is a steady decode step.
        extras: what the step returns beside its tokens.
        failure: why the step was not computed; empty if it was, or if it is void for another reason.
        void: the step was not computed and samples no tokens: it failed, or the rows were dropped earlier.
    """

    step: int
    began: float
    positions: SampledPositions
    inputs: StepInputs | None = None
    sampled_rows: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    sampled: SampledTokens | None = None
    steady: bool = False
    extras: StepExtras = NO_EXTRAS
    failure: str = ""
    void: bool = False
