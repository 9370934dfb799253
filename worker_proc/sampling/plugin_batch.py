"""The logits processor plugins of a worker, and the batch that they see."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import BatchUpdate, LogitsProcessor, apply_update
from quire.protocol.request.sampling_params import SamplingParams
from quire.worker_proc.batch.positions import Ints, SampledPositions
from quire.worker_proc.device.transfer import Transfer
from quire.worker_proc.sampling.isolated import IsolatedPlugin, PluginRequest


class PluginBatch:
    """Owns the plugins and a ``PluginRequest`` per row; builds the batches for plugins from a step's positions.

    Attributes:
        argmax_invariant, non_argmax_invariant: the plugins of each kind.
        active: the plugins that a request of the batch uses; the others cost nothing.
    """

    def __init__(
        self, classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device, transfer: Transfer
    ) -> None:
        self._transfer = transfer
        plugins = [IsolatedPlugin(cls, config, device, device.type == "cuda") for cls in classes]
        self.argmax_invariant = [plugin for plugin in plugins if plugin.is_argmax_invariant]
        self.non_argmax_invariant = [plugin for plugin in plugins if not plugin.is_argmax_invariant]
        self.active: list[IsolatedPlugin] = []
        self._plugins = plugins
        self._rows: dict[int, PluginRequest] = {}

    def used_by(self, params: SamplingParams) -> list[IsolatedPlugin]:
        """Return the plugins that a request with these parameters uses."""
        return [plugin for plugin in self._plugins if plugin.is_used_by(params)]

    def update_state(self, update: BatchUpdate | None) -> None:
        if not self._plugins:
            return
        if update is None:
            for plugin in self.active:
                plugin.update_state(None, self._rows)
            return
        apply_update(self._rows, update, self._request)
        for plugin in self._plugins:
            plugin.update_state(update, self._rows)
        used = {id(plugin) for held in self._rows.values() for plugin in held.uses}
        self.active = [plugin for plugin in self._plugins if id(plugin) in used]

    def reset(self) -> None:
        """Start over with an empty batch, without regard to updates that were not applied."""
        self._rows.clear()
        self.active = []
        for plugin in self._plugins:
            plugin.reset()

    def _request(self, params: SamplingParams, prompt: list[int], output: list[int]) -> PluginRequest:
        return PluginRequest(params, prompt, output, self.used_by(params))

    def apply(
        self, plugins: Sequence[IsolatedPlugin], logits: torch.Tensor, positions: SampledPositions
    ) -> dict[int, str]:
        """Apply ``plugins``, a subset of this batch's plugins, to float32 ``[len(positions), vocab]`` in place.

        The first positions of all rows form one batch. The second positions form the next, with each row's first draft
        appended to its output, and so on. So plugins do not need to know about drafts.

        Returns:
            The reason for each position that failed.
        """
        failed: dict[int, str] = {}
        with self._outputs_restored(positions):
            for level in range(int(positions.offsets.max(initial=-1)) + 1):
                at = np.flatnonzero(positions.offsets == level)
                if level:
                    for place in at.tolist():
                        self._rows[int(positions.rows[place])].output.append(int(positions.drafts[place - 1]))
                    for plugin in plugins:
                        plugin.update_state(None, self._rows)
                failed |= self._apply_once(plugins, logits, at, positions.rows[at])
        return failed | {
            place: self._rows[row].failed for place, row in enumerate(positions.rows.tolist()) if self._rows[row].failed
        }

    def _apply_once(
        self, plugins: Sequence[IsolatedPlugin], logits: torch.Tensor, at: Ints, rows: Ints
    ) -> dict[int, str]:
        """Apply the plugins to one position of each of ``rows``: position ``at[i]`` of row ``rows[i]``."""
        there, own = self._transfer(at, rows)
        is_whole = len(at) == len(logits) == len(self._rows) and np.array_equal(rows, np.arange(len(rows)))
        whole = logits
        if not is_whole:
            whole = logits.new_zeros(len(self._rows), logits.shape[1])
            whole[own] = logits[there]
        failed: dict[int, str] = {}
        for plugin in plugins:
            whole, broken = plugin.apply(whole, rows, own, self._rows)
            failed = broken | failed
        logits[there] = whole[own]
        return {place: failed[row] for place, row in zip(at.tolist(), rows.tolist(), strict=True) if row in failed}

    @contextmanager
    def _outputs_restored(self, positions: SampledPositions) -> Iterator[None]:
        """Remove drafts that were appended to the rows' outputs on exit."""
        lengths = [(held.output, len(held.output)) for held in self._rows.values()] if positions.any_drafts else []
        try:
            yield
        finally:
            for output, length in lengths:
                del output[length:]
