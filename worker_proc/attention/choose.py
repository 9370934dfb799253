"""Which attention backend a worker gets: known, with the reason, before weights load; what does not fit is refused."""

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.kernels.attention.attention_tiles import MAX_HEAD_DIM
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.process.log import event_logger
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.attention.supports import Needs, Supports

log = event_logger("worker")

Broken = (ImportError, OSError, RuntimeError)
"""What importing a library raises that is not there, was built for another torch, or misses a file of CUDA."""
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """``capability``: compute capability, 9, 0 for 9.0."""

    device: torch.device
    capability: Capability


@dataclass(frozen=True, slots=True)
class Chosen:
    """``description``: name and version or way, for the log."""

    backend: AttentionBackend
    description: str


class Misfit(Exception):
    """A backend cannot run here, or not this model; says what is missing, in phrases."""


class Choice(Protocol):
    """Makes a backend, having looked whether it can run here and has what is needed.

    Raises:
        Misfit: it cannot, or has not.
    """

    def __call__(self, config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen: ...


def pick_backend(
    config: EngineConfig, layout: KVLayout, device: torch.device, capability: Capability | None
) -> AttentionBackend:
    """Who attends; said with the reason. ``auto`` is ours: cpu on a CPU, triton on a GPU.

    Args:
        layout: of this rank: its ``dtype`` is the cache's.
        capability: the GPU's compute capability; None on a CPU.

    Raises:
        ConfigError: the one asked for cannot run here, or not this model; names the flag, what is missing and who
            could.
    """
    wanted = config.attention_backend
    if device.type == "cpu":
        if wanted not in ("auto", "cpu"):
            raise ConfigError(f"--attention-backend {wanted} needs a GPU; on a CPU there is: cpu")
        return _cpu(config)
    if wanted == "cpu":
        raise ConfigError(f"--attention-backend cpu needs --device cpu; on a GPU there are: {', '.join(ON_GPU)}")
    assert capability is not None
    needs, gpu = Needs.of(config, layout), Gpu(device, capability)
    name = "triton" if wanted == "auto" else wanted
    try:
        chosen = ON_GPU[name](config, needs, gpu)
    except Misfit as misfit:
        raise ConfigError(f"--attention-backend {name}: {misfit}; {_others(name, config, needs, gpu)}") from None
    why = "the device is a GPU" if wanted == "auto" else "asked for"
    log.info("attention backend", name=chosen.description, reason=why, graphs=_of_graphs(chosen.backend, config))
    return chosen.backend


def _cpu(config: EngineConfig) -> AttentionBackend:
    from quire.worker_proc.attention.cpu import CpuBackend

    backend = CpuBackend(deterministic=config.deterministic)
    threads = torch.get_num_threads()
    log.info("attention backend", name=backend.describe(), reason="the device is a CPU", threads=threads)
    return backend


def _triton(config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen:
    from quire.worker_proc.attention.triton_backend import TritonBackend

    _require(Supports(max_head_dim=MAX_HEAD_DIM, capabilities=(8, 0)), needs, gpu)
    try:
        backend = TritonBackend(max_rows=config.max_num_seqs, deterministic=config.deterministic)
    except RuntimeError as error:
        raise Misfit(str(error)) from None
    return Chosen(backend, "triton (keys in pieces of a fixed size)" if config.deterministic else "triton")


def _flashinfer(config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen:
    from quire.worker_proc.attention import flashinfer_backend

    _require(flashinfer_backend.SUPPORTS, needs, gpu)
    try:
        backend = flashinfer_backend.FlashInferBackend(gpu.device)
    except Broken as error:
        raise Misfit(f"the library is not usable here ({error}): pip install 'quire[flashinfer]'") from None
    mebibytes = flashinfer_backend.WORKSPACE_BYTES // 2**20
    return Chosen(backend, f"flashinfer (workspace {mebibytes} MiB; kernels are compiled when first used)")


def _flash_attn(config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen:
    """The first version of the library that is installed and fits."""
    from quire.worker_proc.attention.flash_attn_backend import VERSIONS, FlashAttnBackend

    reasons = []
    for version in VERSIONS:
        try:
            _require(version.supports, needs, gpu)
            library = version()
        except Broken as error:
            reasons.append(f"{version.name} is not usable here ({error})")
        except Misfit as misfit:
            reasons.append(f"{version.name}: {misfit}")
        else:
            return Chosen(FlashAttnBackend(library), f"flash_attn ({library.name})")
    raise Misfit("; ".join(reasons) + " (pip install 'quire[flash-attn]' has version 2)")


ON_GPU: dict[str, Choice] = {"triton": _triton, "flashinfer": _flashinfer, "flash_attn": _flash_attn}


def _require(supports: Supports, needs: Needs, gpu: Gpu) -> None:
    lacks = supports.lacks(needs, gpu.capability)
    if lacks:
        raise Misfit(f"it has no {', no '.join(lacks)}")


def _others(refused: str, config: EngineConfig, needs: Needs, gpu: Gpu) -> str:
    """Who would do. Asking them imports their libraries: this is the way to an error."""
    fitting = []
    for name, choice in ON_GPU.items():
        if name != refused:
            try:
                choice(config, needs, gpu)
            except Misfit:
                continue
            fitting.append(name)
    return f"what fits here: {', '.join(fitting)}" if fitting else "nothing else fits here either"


def _of_graphs(backend: AttentionBackend, config: EngineConfig) -> str:
    if config.enforce_eager:
        return "no CUDA graphs (--enforce-eager)"
    if backend.needs_host_lengths:
        return "it is planned from lengths on the host, so steady decode is launched kernel by kernel: no CUDA graphs"
    return "steady decode is replayed from CUDA graphs"
