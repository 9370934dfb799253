"""Somebody else's logits processor, behind walls: what it breaks is its request's own affair, never a neighbour's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.request.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor
from quire.protocol.request.plugins import one_line
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints

log = event_logger("worker")


@dataclass(slots=True, eq=False)
class Held:
    """A request as a plugin is told of it. ``failed``: a plugin could not take it, for this reason."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    failed: str = ""


Rows = Mapping[int, Held]


class WrongResult(Exception):
    """A plugin's logits cannot be used."""


class IsolatedPlugin:
    """Owns the plugin's instance that serves the batch, and replaces it when it has failed.

    The instance works on a copy of the logits. Where it raises, or returns what cannot be used, each row is computed
    again alone, by an instance that knows nothing else: so whoever is to blame is found, and the others get what the
    plugin has for them. What such a plugin keeps besides the lists that it was given begins anew then.
    """

    def __init__(
        self, cls: type[LogitsProcessor], config: EngineConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        """Raises ConfigError when there can be no instance at all."""
        self.name = cls.__name__
        self._make: Callable[[], LogitsProcessor] = lambda: cls(config, device, is_pin_memory)
        try:
            self.main: LogitsProcessor | None = self._make()
            self.is_argmax_invariant = bool(self.main.is_argmax_invariant())
        except Exception as error:
            raise ConfigError(
                f"logits processor {self.name} cannot be made: {type(error).__name__}: {one_line(error)}"
            ) from error

    def update_state(self, update: BatchUpdate | None, rows: Rows) -> None:
        """``rows``: the batch after the update; whoever the plugin cannot take is marked there."""
        if self.main is None:
            if update is not None:
                self._begin_anew(rows)
            return
        try:
            self.main.update_state(update)
        except Exception as error:
            self._tell(error)
            self._begin_anew(rows)

    def reset(self) -> None:
        """The batch is empty."""
        self._begin_anew({})

    def apply(self, logits: torch.Tensor, sampled: Ints, rows: Rows) -> tuple[torch.Tensor, dict[int, str]]:
        """What becomes of ``logits``, float32 ``[batch_size, vocab_size]``, which are not changed.

        Args:
            sampled: the rows that count; what the others have does not matter.

        Returns:
            The logits to go on with, and for each row that failed the reason; its logits are as they were.
        """
        usable = logits.amax(-1) < torch.inf  # not so where the model's own logits are no numbers: nobody's fault here
        if self.main is not None:
            try:
                there = torch.from_numpy(sampled).to(logits.device)
                result = self.main.apply(logits.clone())
                _check(result, logits, usable, there)
                return result, {}
            except Exception as error:
                self._tell(error)
        result, failed = self._each_alone(logits, usable, sampled, rows)
        self._begin_anew(rows)
        return result, failed

    def _each_alone(
        self, logits: torch.Tensor, usable: torch.Tensor, sampled: Ints, rows: Rows
    ) -> tuple[torch.Tensor, dict[int, str]]:
        results, failed = logits.clone(), {}
        for row in sampled.tolist():
            if rows[row].failed:
                continue
            own = logits[row : row + 1]
            try:
                alone = self._made_for({0: rows[row]}, 1)
                result = alone.apply(own.clone())
                _check(result, own, usable[row : row + 1], torch.zeros(1, dtype=torch.int64, device=logits.device))
                results[row] = result[0]
            except Exception as error:
                failed[row] = self._why(error)
        return results, failed

    def _begin_anew(self, rows: Rows) -> None:
        """With an instance of the same batch; without those that it cannot take. Without any, if even so it fails."""
        self.main = None
        try:
            self.main = self._made_for(_unfailed(rows), len(rows))
            return
        except Exception as error:
            self._tell(error)
        for held in _unfailed(rows).values():
            try:
                self._made_for({0: held}, 1)
            except Exception as error:
                held.failed = self._why(error)
        try:
            self.main = self._made_for(_unfailed(rows), len(rows))
        except Exception as error:
            self._tell(error)

    def _made_for(self, rows: Rows, batch_size: int) -> LogitsProcessor:
        fresh = self._make()
        added = [AddedRequest(row, held.params, held.prompt, held.output) for row, held in sorted(rows.items())]
        if added:
            fresh.update_state(BatchUpdate(batch_size, (), added, ()))
        return fresh

    def _why(self, error: Exception) -> str:
        """For the client: neither the error's text nor its place, which are the operator's."""
        return f"logits processor {self.name} failed: {error if type(error) is WrongResult else type(error).__name__}"

    def _tell(self, error: Exception) -> None:
        log.warning("logits processor failed", name=self.name, exc_info=error)


def _unfailed(rows: Rows) -> dict[int, Held]:
    return {row: held for row, held in rows.items() if not held.failed}


def _check(result: object, before: torch.Tensor, usable: torch.Tensor, sampled: torch.Tensor) -> None:
    """Raise WrongResult unless ``result`` can stand for ``before``, in those ``sampled`` rows that were usable."""
    if not isinstance(result, torch.Tensor):
        raise WrongResult("no tensor")
    if result.shape != before.shape or result.dtype != before.dtype or result.device != before.device:
        raise WrongResult("wrong shape or dtype")
    spoilt = usable & ~(result.amax(-1) < torch.inf)
    if bool(spoilt[sampled].any()):
        raise WrongResult("NaN or infinity")
