"""Sites of LoRA adapters: the layers that they change, and the place of each projection in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu.linear.lora import DTYPES, CpuAdapters
from quire.kernels.cpu.native.library import load_native
from quire.kernels.lora.lora import AdapterRows, LoraPart, SlotTable, add_adapters, launch_adapters
from quire.protocol.config import EngineConfig
from quire.worker_proc.models.additions import Addition
from quire.worker_proc.models.weight_slot import Cut

ALIGNMENT = 64
"""Alignment in bytes of every matrix of an adapter."""

Add = Callable[[torch.Tensor, torch.Tensor, SlotTable, AdapterRows], None]
"""Adds what the adapters add, as ``kernels.lora.lora.add_adapters`` does."""


@dataclass(frozen=True, slots=True)
class SiteTarget:
    """The place of a projection: in the site ``site``, whose outputs from ``first`` on are this rank's ``cut``."""

    site: int
    cut: Cut
    first: int


def make_sites(config: EngineConfig, dtype: torch.dtype, device: torch.device | str) -> "AdapterSites | None":
    """Make the sites on the model's device, or return None without ``--enable-lora``."""
    if not config.enable_lora:
        return None
    most = max(config.max_num_batched_tokens, config.max_num_seqs * (1 + config.num_speculative_tokens))
    return AdapterSites(config.max_loras + 1, config.max_lora_rank, most, dtype, device, _pick_add(device))


def _pick_add(device: torch.device | str) -> Add:
    kind = torch.device(device).type
    if kind == "cuda":
        return launch_adapters
    native = load_native() if kind == "cpu" else None
    if native is None:
        return add_adapters
    fast = CpuAdapters(native).add

    def add(x: torch.Tensor, y: torch.Tensor, table: SlotTable, rows: AdapterRows) -> None:
        accepts = table.dtype in DTYPES and all(each.stride(-1) == 1 or not each.numel() for each in (x, y))
        (fast if accepts else add_adapters)(x, y, table, rows)

    return add


class AdapterSites:
    """All sites of a model, and the adapters that the tokens of the running step use: its ``Additions``.

    A site is a fused linear layer with a table of the adapters in each slot. A model without LoRA has no sites.

    Attributes:
        active: whether a row of the running step uses an adapter. The sites of other steps do nothing.
        changes_experts: whether such an adapter changes experts.
        targets: the place of each projection, by its full name, such as ``model.layers.0.self_attn.q_proj``.
        rows: the slot of each token of the step, in memory that recorded plans and CUDA graphs read.
        dtype: dtype of the adapters' matrices, which is that of the activations.
    """

    def __init__(
        self, num_slots: int, max_rank: int, max_tokens: int, dtype: torch.dtype, device: torch.device | str, add: Add
    ) -> None:
        """
        Args:
            max_tokens: maximum number of tokens of a step, with padding.
            device: as for ``Decoder``; on ``meta`` the sites can be counted.
        """
        self.num_slots, self.max_rank, self.dtype, self.device = num_slots, max_rank, dtype, torch.device(device)
        self.add = add
        self.active = self.changes_experts = False
        self.targets: dict[str, SiteTarget] = {}
        self._tables: list[SlotTable] = []
        self.rows = AdapterRows(max_tokens, num_slots, self.device)
        self._routed = AdapterRows(max_tokens, num_slots, self.device)
        self._routed_sites: set[int] = set()
        self._is_routed = np.zeros(num_slots + 1, np.bool_)
        """Whether the adapter in each slot changes experts; the last entry is that of NO_SLOT, -1."""

    def at(self, layer: str, cuts: Sequence[Cut], *, routed: bool = False) -> "Site":
        """Make the site of a fused layer."""
        if routed:
            self._routed_sites.add(len(self._tables))
        first = 0
        for cut in cuts:
            self.targets[f"{layer}.{cut.name}"] = SiteTarget(len(self._tables), cut, first)
            first += cut.num_rows
        sizes = (cuts[0].num_columns, first, len(cuts), self.max_rank)
        self._tables.append(SlotTable(self.num_slots, *sizes, self.dtype, self.device))
        return Site(self, self._tables[-1], self._routed if routed else self.rows)

    def at_experts(self, pairs: Sequence[tuple[Addition, Addition]]) -> "ExpertSites":
        return ExpertSites(self, pairs)

    def set_slot(self, slot: int, parts: Mapping[int, Sequence[LoraPart]]) -> None:
        """Replace the adapter in a slot of all sites. ``parts``: by the number of their site."""
        self._is_routed[slot] = not self._routed_sites.isdisjoint(parts)
        for number, table in enumerate(self._tables):
            if number in parts:
                table.set(slot, parts[number])
            elif table.parts(slot):
                table.clear(slot)

    def begin_step(self, slots: npt.NDArray[np.int32] | None) -> None:
        """Begin a step. ``slots``: slot of each of its rows, NO_SLOT for none; None if no row uses an adapter."""
        self.active = slots is not None
        self.changes_experts = slots is not None and bool(self._is_routed[slots].any())

    def route(self, tokens: torch.Tensor) -> bool:
        """Let the routed sites compute these tokens of the step; return whether an adapter of one changes experts.

        On a GPU this waits for the device.
        """
        slots = self.rows.slots[tokens.cpu().numpy()]
        if not self._is_routed[slots].any():
            return False
        self._routed.assign(slots)
        return True

    @property
    def slot_bytes(self) -> int:
        """Bytes of an adapter of the highest rank that changes every projection but those of experts."""
        plain = [target.cut for target in self.targets.values() if target.site not in self._routed_sites]
        sizes = [size for cut in plain for size in (cut.num_columns, cut.num_rows)]
        return sum(aligned_bytes(self.max_rank * size, self.dtype) for size in sizes)


def aligned_bytes(elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a matrix takes in the memory of an adapter."""
    return -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Site:
    """Adds to a layer's outputs what the adapters of the rows add."""

    def __init__(self, sites: AdapterSites, table: SlotTable, rows: AdapterRows) -> None:
        self._sites, self._table, self._rows = sites, table, rows

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self._sites.active:
            self._sites.add(x, y, self._table, self._rows)


class ExpertSites:
    """The sites of a layer's experts: per expert those of its gate and up projections, and of its down projection."""

    def __init__(self, sites: AdapterSites, pairs: Sequence[tuple[Addition, Addition]]) -> None:
        self._sites, self._pairs = sites, pairs

    def of(self, expert: int, tokens: torch.Tensor) -> tuple[Addition, Addition] | None:
        return self._pairs[expert] if self.in_use and self._sites.route(tokens) else None

    @property
    def in_use(self) -> bool:
        return self._sites.changes_experts
