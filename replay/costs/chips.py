"""Data sheets of chips: built in by name, or read from a file."""

from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from quire.protocol.errors import ConfigError, did_you_mean
from quire.replay.costs.csv_table import read_text
from quire.replay.costs.link import Interconnect

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Chip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. All figures are per second, in bytes and floating-point operations, without sparsity.

    Attributes:
        flops: peak of matrix products by dtype (bfloat16, float16, float32).
        bandwidth: peak of its memory.
        gemm_efficiency, attention_efficiency: share of ``flops`` that large matrix products, and attention over long
            prompts, reach.
        memory_efficiency: share of ``bandwidth`` that a kernel reaches which streams weights or KV.
        kernel_seconds: minimum time of a kernel, including its launch in the stream.
        link_bandwidth, link_latency: to the other chips of a group, one way and per message.
        host_bandwidth: to host memory, one way: what copies of whole KV blocks reach.
    """

    name: str = "chip"
    flops: dict[str, Positive]
    memory_bytes: Positive
    bandwidth: Positive
    gemm_efficiency: Share = 0.75
    attention_efficiency: Share = 0.5
    memory_efficiency: Share = 0.85
    kernel_seconds: Positive = 2.5e-6
    link_bandwidth: Positive = 25e9
    link_latency: Positive = 1e-5
    host_bandwidth: Positive = 25e9

    @property
    def link(self) -> Interconnect:
        return Interconnect(self.link_bandwidth, self.link_latency)

    def flops_of(self, dtype: str) -> float:
        """Return the peak for ``dtype``. Raises ConfigError if the chip's description has none."""
        if dtype not in self.flops:
            raise ConfigError(f"{self.name}: flops has no {dtype}; it has {', '.join(self.flops)}")
        return self.flops[dtype]


PCIE = {4: 25e9, 5: 51e9}
"""Bytes per second one way by generation, with 16 lanes: 80 % of the peak. On an H100, vLLM's copies of whole blocks
reach 51 GB/s."""


def _gpu(
    name: str, half: float, single: float, memory: float, bandwidth: float, link: float, latency: float, pcie: int
) -> Chip:
    """Build a Chip from TFLOP/s (16 bits, 32 bits), GB, GB/s, GB/s one way, microseconds and the generation of PCIe."""
    return Chip(
        name=name,
        flops={"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12},
        memory_bytes=memory * 1e9,
        bandwidth=bandwidth * 1e9,
        link_bandwidth=link * 1e9,
        link_latency=latency * 1e-6,
        host_bandwidth=PCIE[pcie],
    )


CHIPS = {
    chip.name: chip
    for chip in (
        _gpu("a100-80g", 312, 19.5, 85.0, 2039, 300, 2.5, 4),
        _gpu("b200", 2250, 75, 192, 8000, 900, 2.5, 5),
        _gpu("h100", 989, 67, 85.0, 3350, 450, 2.5, 5),
        _gpu("h200", 989, 67, 150.1, 4800, 450, 2.5, 5),
        _gpu("l4", 121, 30.3, 24.0, 300, 25, 10, 4),
        _gpu("l40s", 362, 91.6, 48.0, 864, 25, 10, 4),
        _gpu("mi300x", 1307, 163, 206, 5300, 448, 2.5, 5),
        # Its clock exceeds the data sheet's, so measured products reach nearly all of the sheet's peak.
        msgspec.structs.replace(_gpu("rtx4090", 165, 82.6, 25.25, 1008, 25, 10, 4), gemm_efficiency=0.97),
        _gpu("rtxpro6000", 504, 126, 101.97, 1597, 50, 10, 5),
        # A server with 32 cores and eight memory channels.
        Chip(
            name="cpu",
            flops={"bfloat16": 3e12, "float16": 3e12, "float32": 3e12},
            memory_bytes=128e9,
            bandwidth=200e9,
            kernel_seconds=1e-5,
            link_bandwidth=50e9,
            link_latency=2e-6,
            host_bandwidth=10e9,  # one thread copies
        ),
    )
}
"""Built-in chips by name, with the makers' figures for dense products."""


def find_chip(name: str) -> Chip:
    """Return a built-in chip, or the one described by a YAML or JSON file with Chip's attributes.

    Raises:
        ConfigError: an unknown name (suggests the nearest), or an invalid file.
    """
    if name.lower() in CHIPS:
        return CHIPS[name.lower()]
    path = Path(name).expanduser()
    if path.suffix in (".json", ".yaml", ".yml") or path.is_file():
        return _read_chip(path)
    near = did_you_mean(name.lower(), CHIPS) or f"; known: {', '.join(CHIPS)}, or a YAML or JSON file"
    raise ConfigError(f"{name}: unknown chip{near}")


def _read_chip(path: Path) -> Chip:
    try:
        raw = yaml.safe_load(read_text(path))
        if isinstance(raw, dict):
            raw = {"name": path.stem} | raw
        return msgspec.convert(raw, Chip, strict=False)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
