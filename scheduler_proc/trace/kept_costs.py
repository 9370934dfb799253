"""Keeps learned costs in a file, for the next start of an engine with the same model, device and layout."""

import hashlib
from contextlib import suppress
from pathlib import Path

import msgspec

from quire.protocol.process.log import event_logger
from quire.scheduler_proc.costs.costs import Costs, CostState
from quire.scheduler_proc.trace.event_log import TraceHeader

log = event_logger("scheduler")


class KeptCosts:
    """The file of one engine. A file that cannot be read or written only costs what was learned.

    Two engines that share the file replace what the other has learned.
    """

    def __init__(self, header: TraceHeader) -> None:
        config = header.config
        is_used = header.num_host_pages or header.num_disk_pages or config.scheduling_policy == "continuum"
        key = config.model, config.device, config.dtype, config.tensor_parallel_size, header.kv_layout
        name = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
        folder = config.learned_costs_dir
        self._path = Path(folder) / f"{name}.json" if folder and is_used else None
        self._written = CostState()

    def read(self) -> CostState:
        """Return what an earlier engine has learned, if anything, aged."""
        if self._path is None or not self._path.exists():
            return CostState()
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=CostState)
            costs = Costs(found)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("ignored the learned costs of loads and prefills", file=str(self._path), reason=error)
            return CostState()
        costs.age()
        self._written = costs.state
        return self._written

    def write(self, costs: Costs) -> None:
        """Replace the file if anything was learned since it was read or written."""
        if self._path is None or (state := costs.state) == self._written:
            return
        self._written = state
        scratch = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch.write_bytes(msgspec.json.encode(state))
            scratch.replace(self._path)
        except OSError as error:
            log.warning("cannot keep the learned costs", file=str(self._path), reason=error)
            with suppress(OSError):
                scratch.unlink()
