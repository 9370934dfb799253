"""A step's result on its way from the device to the scheduler."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.common.logits import TopLogprobs
from quire.protocol.wire.logprobs import LogprobArrays, Logprobs, PromptLogprobs
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.worker_proc.batch.positions import Ints
from quire.worker_proc.sampling.accept import Accepted
from quire.worker_proc.sampling.prompt_logprobs import PromptRows
from quire.worker_proc.sampling.sampler import Sampled


class PendingResult(Protocol):
    """A step whose kernels are launched, or that has failed."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` would not wait."""
        ...

    def result(self) -> ModelRunnerOutput:
        """The message; waits for the device if it must."""
        ...


class StepClock:
    """How long steps take the device: of two that overlap, the second begins when the first has ended."""

    def __init__(self) -> None:
        self._ended = 0.0

    def end(self, began: float) -> float:
        """Seconds of a step that has ended now, the oldest of those that had not."""
        now = time.perf_counter()
        seconds = now - max(began, self._ended)
        self._ended = now
        return seconds


@dataclass(frozen=True, slots=True)
class NothingSampled:
    """A step of which no row reached its last known position, or that was not computed (``failure`` says why)."""

    step: int
    handles: npt.NDArray[np.int32] | None = None
    prompt_rows: PromptRows | None = None
    failure: str = ""

    @property
    def ready(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        prompts = _prompt_logprobs(self.prompt_rows)
        return ModelRunnerOutput(self.step, handles=self.handles, failure=self.failure, prompt_logprobs=prompts)


@dataclass(frozen=True, slots=True)
class SampledResult:
    """Tokens, which on a GPU are still being computed or copied.

    Attributes:
        handles: as in ``ModelRunnerOutput``: None where they are the same as in the result before.
        row_handles: of the sampled rows, always.
        copy: of ``sampled.tokens`` and ``sampled.bad``, in this order.
        end: tells the clock that the step has ended, and gives its seconds.
        accepted: of a step with drafts.
    """

    step: int
    sampled: Sampled
    handles: npt.NDArray[np.int32] | None
    row_handles: npt.NDArray[np.int32]
    copy: "HostCopy"
    end: Callable[[], float]
    accepted: Accepted | None = None
    prompt_rows: PromptRows | None = None

    @property
    def ready(self) -> bool:
        return self.copy.ready

    def result(self) -> ModelRunnerOutput:
        tokens, bad = self.copy.arrays()
        seconds = self.end()
        accepted = self.accepted
        kept = np.arange(len(self.row_handles)) if accepted is None else accepted.kept
        owners = self.row_handles if accepted is None else np.repeat(self.row_handles, accepted.counts)
        failed = [(int(owners[i]), why) for at, why in self.sampled.failed for i in np.flatnonzero(kept == at)]
        return ModelRunnerOutput(
            self.step,
            tokens[kept].astype(np.int32),
            self.handles,
            counts=accepted.counts if accepted is not None and (accepted.counts != 1).any() else None,
            bad=list(dict.fromkeys(owners[bad[kept]].tolist())),
            seconds=seconds,
            drafts=None if accepted is None else accepted.drafts,
            failed=list(dict(failed).items()),
            logprobs=self.sent_logprobs(kept),
            prompt_logprobs=_prompt_logprobs(self.prompt_rows),
        )

    def sent_logprobs(self, kept: Ints) -> Logprobs | None:
        """The log probabilities, each with the index that its token has among those that are sent."""
        sampled = self.sampled.logprobs
        if sampled is None:
            return None
        token_of = np.full(int(kept.max(initial=-1)) + 1, -1, np.int64)
        token_of[kept] = np.arange(len(kept))
        at = np.array(sampled.at, np.int64)
        rows = np.where(at < len(token_of), token_of[np.minimum(at, len(token_of) - 1)], -1)
        picked = np.flatnonzero(rows >= 0)
        return Logprobs(rows[picked].tolist(), _on_host(sampled.logprobs).take(picked))


def _prompt_logprobs(rows: PromptRows | None) -> PromptLogprobs | None:
    return None if rows is None else PromptLogprobs(rows.handles, rows.starts, rows.counts, _on_host(rows.logprobs))


def _on_host(logprobs: TopLogprobs) -> LogprobArrays:
    """Waits for the device."""
    token_ids, ranks = (tensor.cpu().numpy().astype(np.int32) for tensor in (logprobs.token_ids, logprobs.ranks))
    return LogprobArrays.of(token_ids, logprobs.values.cpu().numpy(), ranks)


class HostCopy:
    """Tensors being copied to the host; on a CPU they are there."""

    def __init__(self, there: list[torch.Tensor], copied: "torch.cuda.Event | None") -> None:
        self._there = there
        self._copied = copied

    @property
    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Waits for the device. Valid until three more copies have begun."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.numpy() for tensor in self._there]


class HostCopies:
    """Copies small results to the host on a stream of their own, so that the next step's kernels need not wait.

    Owns that stream and pinned memory. A tensor may be overwritten by what is launched after ``start``: the device
    itself waits for the copy before (``before_next``).
    """

    _IN_TURN = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned: deque[list[torch.Tensor]] = deque(maxlen=self._IN_TURN)
        self._last: torch.cuda.Event | None = None

    def start(self, *tensors: torch.Tensor) -> HostCopy:
        """Begin once what computes ``tensors`` is done; they stay referenced until it has ended."""
        if self._stream is None:
            return HostCopy(list(tensors), None)
        there = self._take(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, tensor in zip(there, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._last = copied
        return HostCopy(there, copied)

    def before_next(self) -> None:
        """Make what is launched next on the device wait for the copies begun so far."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def _take(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Pinned memory of these shapes, in turn: at most three results are in use while a fourth is filled."""
        if len(self._pinned) == self._IN_TURN:
            oldest = self._pinned.popleft()
            fits = len(oldest) == len(tensors) and all(
                p.dtype == t.dtype and p.numel() >= t.numel() for p, t in zip(oldest, tensors, strict=True)
            )
            if fits:
                self._pinned.append(oldest)
                return [p[: t.numel()].view(t.shape) for p, t in zip(oldest, tensors, strict=True)]
        fresh = [torch.empty(max(t.numel(), 1), dtype=t.dtype, pin_memory=True) for t in tensors]
        self._pinned.append(fresh)
        return [p[: t.numel()].view(t.shape) for p, t in zip(fresh, tensors, strict=True)]
