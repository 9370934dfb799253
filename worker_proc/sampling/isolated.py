"""Isolation of plugin logits processors: a failure ends only the request that causes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.process.log import event_logger
from quire.protocol.request.logits_processors import AdapterLogitsProcessor, AddedRequest, BatchUpdate, LogitsProcessor
from quire.protocol.request.plugins import one_line
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints

log = event_logger("worker")


@dataclass(slots=True, eq=False)
class PluginRequest:
    """A request as plugins see it.

    Attributes:
        uses: the plugins that may change its logits.
        failed: the reason if a plugin failed to add it, or empty.
    """

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    uses: "list[IsolatedPlugin]"
    failed: str = ""


Rows = Mapping[int, PluginRequest]


class InvalidResult(Exception):
    """The logits that a plugin returned cannot be used."""


class IsolatedPlugin:
    """Owns the plugin instance of the batch, and replaces it after a failure.

    The instance gets a copy of the logits. If it raises, or returns an unusable result, every row is recomputed
    by a new instance that has only this row: that finds the failing requests, and the others get their results. The
    instance that replaces the failed one loses all state except the requests' token lists.
    """

    def __init__(
        self, cls: type[LogitsProcessor], config: EngineConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        """Raises ConfigError if the plugin's constructor fails."""
        self.name = cls.__name__
        self._cls = cls
        self._make: Callable[[], LogitsProcessor] = lambda: cls(config, device, is_pin_memory)
        try:
            self.main: LogitsProcessor | None = self._make()
            self.is_argmax_invariant = bool(self.main.is_argmax_invariant())
        except Exception as error:
            raise ConfigError(
                f"logits processor {self.name}: constructor failed: {type(error).__name__}: {one_line(error)}"
            ) from error

    def is_used_by(self, params: SamplingParams) -> bool:
        """Return whether ``apply`` may change the logits of a request; true if that raises."""
        try:
            if isinstance(self.main, AdapterLogitsProcessor):
                return self.main.new_req_logits_processor(params) is not None
            return bool(self._cls.uses(params))
        except Exception:
            return True

    def update_state(self, update: BatchUpdate | None, rows: Rows) -> None:
        """Apply a batch update, and mark the requests that the plugin fails to add. ``rows``: the batch after it."""
        if self.main is None:
            if update is not None:
                self._recreate(rows)
            return
        try:
            self.main.update_state(update)
        except Exception as error:
            self._log_failure(error)
            self._recreate(rows)

    def reset(self) -> None:
        """Start over with an empty batch."""
        self._recreate({})

    def apply(
        self, logits: torch.Tensor, sampled: Ints, there: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Apply the plugin to ``logits``, float32 ``[batch_size, vocab_size]``, which are not changed.

        Args:
            sampled: the rows that are sampled; the result for other rows is ignored.
            there: the same on the device.

        Returns:
            The new logits, and the reason for each row that failed; a failed row's logits are unchanged.
        """
        usable = logits.amax(-1) < torch.inf  # false if the model's own logits are not finite
        if self.main is not None:
            try:
                result = self.main.apply(logits.clone())
                _check(result, logits, usable, there)
                return result, {}
            except Exception as error:
                self._log_failure(error)
        result, failed = self._apply_row_by_row(logits, usable, sampled, rows)
        self._recreate(rows)
        return result, failed

    def _apply_row_by_row(
        self, logits: torch.Tensor, usable: torch.Tensor, sampled: Ints, rows: Rows
    ) -> tuple[torch.Tensor, dict[int, str]]:
        results, failed = logits.clone(), {}
        for row in sampled.tolist():
            if rows[row].failed:
                continue
            own = logits[row : row + 1]
            try:
                alone = self._new_instance({0: rows[row]}, 1)
                result = alone.apply(own.clone())
                _check(result, own, usable[row : row + 1], torch.zeros(1, dtype=torch.int64, device=logits.device))
                results[row] = result[0]
            except Exception as error:
                failed[row] = self._client_reason(error)
        return results, failed

    def _recreate(self, rows: Rows) -> None:
        """Replace the instance by a new one with the same batch, without the requests that it fails to add.

        ``main`` is None if that fails too.
        """
        self.main = None
        try:
            self.main = self._new_instance(_unfailed(rows), len(rows))
            return
        except Exception as error:
            self._log_failure(error)
        for held in _unfailed(rows).values():
            try:
                self._new_instance({0: held}, 1)
            except Exception as error:
                held.failed = self._client_reason(error)
        try:
            self.main = self._new_instance(_unfailed(rows), len(rows))
        except Exception as error:
            self._log_failure(error)

    def _new_instance(self, rows: Rows, batch_size: int) -> LogitsProcessor:
        fresh = self._make()
        added = [AddedRequest(row, held.params, held.prompt, held.output) for row, held in sorted(rows.items())]
        if added:
            fresh.update_state(BatchUpdate(batch_size, (), added, ()))
        return fresh

    def _client_reason(self, error: Exception) -> str:
        """Describe the failure to the client, without the error's text and traceback, which are for the operator."""
        return f"logits processor {self.name} failed: {error if type(error) is InvalidResult else type(error).__name__}"

    def _log_failure(self, error: Exception) -> None:
        log.warning("logits processor failed", name=self.name, exc_info=error)


def _unfailed(rows: Rows) -> dict[int, PluginRequest]:
    return {row: held for row, held in rows.items() if not held.failed}


def _check(result: object, before: torch.Tensor, usable: torch.Tensor, sampled: torch.Tensor) -> None:
    """Raise InvalidResult unless ``result`` can replace ``before`` in all ``sampled`` rows that were usable."""
    if not isinstance(result, torch.Tensor):
        raise InvalidResult(f"result is not a tensor (got {type(result).__name__})")
    for name in ("shape", "dtype", "device"):
        got, expected = getattr(result, name), getattr(before, name)
        if got != expected:
            raise InvalidResult(f"wrong {name} of the logits: got {got}, expected {expected}")
    spoilt = usable & ~(result.amax(-1) < torch.inf)
    if bool(spoilt[sampled].any()):
        raise InvalidResult("NaN or infinity in the logits")
