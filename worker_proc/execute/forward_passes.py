"""Recorded forward passes: the CPU's counterpart of CUDA graphs, for steps of few tokens.

The Python between native calls takes as long as the calls themselves when a step has few rows. So the first step with
some number of tokens records its native calls, and later steps with as many tokens run them again on the same memory.
Steps in which rows add to linear layers have passes of their own.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.native.recorded_plan import NotRecordable, RecordedPlan, record
from quire.protocol.process.log import event_logger
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.cpu_native import NativePlan, NativeStep, require_no_error
from quire.worker_proc.execute.device_inputs import DeviceInputs
from quire.worker_proc.execute.forward import Forward
from quire.worker_proc.models.model import Inputs

log = event_logger("worker")

MOST_TOKENS = 64
"""Tokens of a recorded step. In longer ones Python takes a few percent of the time."""

MOST_PLANS = 64
"""Recorded passes that are kept, each with memory for its activations."""


@dataclass(slots=True)
class _Pass:
    """A recorded pass: memory that a step fills, the plan, and the tensors that it writes."""

    inputs: Inputs
    plans: list[NativePlan]
    plan: RecordedPlan
    hidden: torch.Tensor
    scores: torch.Tensor


class ForwardPasses:
    """Runs the model and its head on a step, from recorded plans where possible."""

    def __init__(self, forward: Forward, *, eager: bool) -> None:
        """
        Args:
            eager: record nothing.
        """
        self._forward = forward
        backend = forward.backend
        self._native: Native | None = None
        build = forward.model.build
        # A plan repeats the library's operations alone: neither collectives nor the notes of routed experts.
        if isinstance(backend, CpuBackend) and not eager and build.parallel.size == 1 and build.routes is None:
            if forward.model.can_be_captured:
                self._native = backend.native
            else:
                log.info("steps are not recorded: transformers computes the model", model=build.config.architecture)
        self._additions = build.additions
        self._passes: OrderedDict[tuple[int, bool], _Pass] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of recorded passes."""
        return len(self._passes)

    def plan(self, num_tokens: int) -> RecordedPlan | None:
        """Return the recorded plan of steps with this number of tokens and without additions, if there is one."""
        found = self._passes.get((num_tokens, False))
        return None if found is None else found.plan

    def run(
        self, sent: DeviceInputs, plans: Sequence[Any], *, sampling: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one step; ``plans``: the attention plan of each group.

        Returns:
            The hidden states of all tokens, and with ``sampling`` the logits of the sampled ones, valid until the next
            step.

        Raises:
            ValueError: attention refused the step.
        """
        model, inputs, chosen = self._forward.model, sent.inputs, sent.sampled_tokens
        fits = inputs.is_plain and len(inputs.token_ids) <= MOST_TOKENS
        if self._native is not None and sampling and chosen is None and fits:
            found = self._recorded(self._native, inputs, plans)
            if found is not None:
                return found.hidden, model.logits_of(found.scores)
        hidden = self._forward.hidden(inputs, plans)
        self._forward.keep_experts(sent.batches)
        return hidden, model.logits(hidden if chosen is None else hidden[chosen]) if sampling else None

    def _recorded(self, native: Native, inputs: Inputs, plans: Sequence[NativePlan]) -> _Pass | None:
        """Run a pass of this size, which is recorded at the first time; None if this model cannot be recorded."""
        key = len(inputs.token_ids), self._additions is not None and self._additions.active
        found = self._passes.get(key)
        if found is None:
            return self._record(native, inputs, plans, key)
        self._passes.move_to_end(key)
        # The plan has addresses, so a step's inputs are copied to the memory that was recorded with.
        found.inputs.token_ids.copy_(inputs.token_ids)
        found.inputs.positions.copy_(inputs.positions)
        for own, plan in zip(found.plans, plans, strict=True):
            own.step.assign(plan.step)
            # The step's memory must outlive it: ``RecordedPlan.profile`` runs the operations once more.
            own.batch, own.prefixes = plan.batch, plan.prefixes
        require_no_error(found.plan.run())
        return found

    def _record(
        self, native: Native, inputs: Inputs, plans: Sequence[NativePlan], key: tuple[int, bool]
    ) -> _Pass | None:
        forward, model = self._forward, self._forward.model
        inputs = Inputs(inputs.token_ids.clone(), inputs.positions.clone())
        own = [NativePlan(NativeStep.of(plan.step), plan.batch, plan.prefixes) for plan in plans]

        def body() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = forward.hidden(inputs, own)
            return hidden, model.scores(hidden)

        try:
            plan, (hidden, scores) = record(native, body, keep=(inputs, own))
        except NotRecordable as reason:
            log.info("steps are not recorded: this model needs an operation that the CPU library lacks", reason=reason)
            self._native = None
            return None
        made = _Pass(inputs, own, plan, hidden, scores)
        self._passes[key] = made
        if len(self._passes) > MOST_PLANS:
            self._passes.popitem(last=False)
        return made
