"""Results of launched steps, and their copies from the device to the host."""

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
    """Result of a step whose kernels are launched, or which has failed."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` returns without waiting."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Return the result message; wait for the device if necessary."""
        ...


class StepClock:
    """Measures the device time of steps: of two overlapping steps, the second starts when the first has ended."""

    def __init__(self) -> None:
        self._ended = 0.0

    def end(self, began: float) -> float:
        """Return the seconds of the step that has ended now; call it in the order in which steps were launched."""
        now = time.perf_counter()
        seconds = now - max(began, self._ended)
        self._ended = now
        return seconds


@dataclass(frozen=True, slots=True)
class NothingSampled:
    """Result of a step without sampled tokens, or of one that was not computed (``failure`` is the reason)."""

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
    """Result with sampled tokens, which on a GPU may still be computed or copied.

    Attributes:
        handles: as in ``ModelRunnerOutput``: None if they are the same as in the previous result.
        row_handles: handles of the sampled rows, never None.
        copy: copy of ``sampled.tokens`` and ``sampled.bad``, in this order.
        end: ends the step in ``StepClock`` and returns its seconds.
        accepted: accepted draft tokens; None for a step without drafts.
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
        failed = [(int(owners[i]), reason) for at, reason in self.sampled.failed for i in np.flatnonzero(kept == at)]
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
        """Return the log probabilities of the tokens in ``kept``, each with its token's index in the result message."""
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
    """Copy log probabilities to the host; waits for the device."""
    token_ids, ranks = (tensor.cpu().numpy().astype(np.int32) for tensor in (logprobs.token_ids, logprobs.ranks))
    return LogprobArrays.of(token_ids, logprobs.values.cpu().numpy(), ranks)


class HostCopy:
    """Tensors being copied to the host; on a CPU the tensors themselves."""

    def __init__(self, tensors: list[torch.Tensor], copied: "torch.cuda.Event | None") -> None:
        self._tensors = tensors
        self._copied = copied

    @property
    def ready(self) -> bool:
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """Wait for the device and return the arrays, which are valid until three more copies start."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class HostCopies:
    """Copies small results to the host on a separate stream, so that the next step's kernels do not wait for them.

    Owns that stream and pinned memory. Kernels launched after ``start`` may overwrite the tensors if ``before_next``
    was called before, which makes the device wait for the copy.
    """

    _NUM_BUFFERS = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned: deque[list[torch.Tensor]] = deque(maxlen=self._NUM_BUFFERS)
        self._last: torch.cuda.Event | None = None

    def start(self, *tensors: torch.Tensor) -> HostCopy:
        """Start a copy that runs after the kernels that compute ``tensors``, and keeps their memory until it ends."""
        if self._stream is None:
            return HostCopy(list(tensors), None)
        pinned = self._take(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, tensor in zip(pinned, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        self._last = copied
        return HostCopy(pinned, copied)

    def before_next(self) -> None:
        """Make kernels launched after this call wait for the copies started so far."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

    def _take(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return pinned memory of these shapes; the oldest of four buffers is reused, at most three are in use."""
        if len(self._pinned) == self._NUM_BUFFERS:
            oldest = self._pinned.popleft()
            fits = len(oldest) == len(tensors) and all(
                p.dtype == t.dtype and p.numel() >= t.numel() for p, t in zip(oldest, tensors, strict=True)
            )
            if fits:
                self._pinned.append(oldest)
                return [p[: t.numel()].view(t.shape) for p, t in zip(oldest, tensors, strict=True)]
        new = [torch.empty(max(t.numel(), 1), dtype=t.dtype, pin_memory=True) for t in tensors]
        self._pinned.append(new)
        return [p[: t.numel()].view(t.shape) for p, t in zip(new, tensors, strict=True)]
