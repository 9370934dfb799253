"""A step between its forward pass and its sampling."""

from dataclasses import dataclass

import torch

from quire.worker_proc.batch.positions import SampledPositions
from quire.worker_proc.batch.step_inputs import StepInputs
from quire.worker_proc.sampling.prompt_logprobs import PromptRows
from quire.worker_proc.sampling.sampler import Sampled


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward pass is on its way, up to its sampling.

    Attributes:
        began: when, by ``time.perf_counter``.
        logits: float32 ``[num_positions, vocab]``; None where nothing is sampled, or ``sampled`` is there already.
        steady: the device's own decode step computed it.
        prompt_rows: log probabilities of prompt tokens that it computed.
        failure: it was not computed, for this reason; an empty string: all is well, or nothing is wanted.
        void: there is nothing to sample, for nobody is held.
    """

    step: int
    began: float
    positions: SampledPositions
    inputs: StepInputs | None = None
    logits: torch.Tensor | None = None
    sampled: Sampled | None = None
    steady: bool = False
    prompt_rows: PromptRows | None = None
    failure: str = ""
    void: bool = False
