"""Selection of the attention backend, before weights are loaded; a backend that lacks a needed feature is an error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout
from quire.protocol.process.log import event_logger
from quire.protocol.settings import MAX_BLOCK_SIZE
from quire.version import install_command
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.attention.supports import Needs, Supports
from quire.worker_proc.attention.whole_rows import WholeRows

log = event_logger("worker")

IMPORT_FAILURES = (ImportError, OSError, RuntimeError)
"""Raised by importing a library that is missing, was built for another torch, or lacks a CUDA file."""
Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """``capability``: compute capability, ``(9, 0)`` for 9.0."""

    device: torch.device
    capability: Capability


class Unsupported(Exception):
    """A backend cannot run on this machine or with this model; the message lists the missing features."""


Chosen = tuple[AttentionBackend, str]
"""A backend, and its name with the version or mode, for the log."""

BackendFactory = Callable[[EngineConfig, Needs, Gpu], Chosen]
"""Makes a backend after checking that it can run here and supports the needed features; otherwise raises
Unsupported."""


def pick_backend(
    config: EngineConfig,
    layout: KVLayout,
    device: torch.device,
    capability: Capability | None,
    *,
    head_scales: bool = False,
) -> AttentionBackend:
    """Select the attention backend and log the reason. ``auto`` is cpu on a CPU and triton on a GPU.

    Args:
        layout: this rank's layout, with the cache's ``dtype``.
        capability: the GPU's compute capability; None on a CPU.
        head_scales: the fp8 cache has scales per head.

    The backend of an encoder does not depend on the flag.

    Raises:
        ConfigError: the requested backend cannot run here or with this model; the message has the flag, the missing
            features and the backends that can.
    """
    if config.model.encoder is not None:
        rows = WholeRows(device)
        log.info("attention backend", name=rows.describe(), reason="the model is an encoder")
        return rows
    wanted = config.attention_backend
    if device.type == "cpu":
        if wanted not in ("auto", "cpu"):
            raise ConfigError(f"--attention-backend {wanted} needs a GPU: use cpu or auto on a CPU")
        return _cpu(config)
    if wanted == "cpu":
        raise ConfigError(f"--attention-backend cpu needs --device cpu: use {', '.join(ON_GPU)} or auto on a GPU")
    assert capability is not None
    needs, gpu = Needs.of(config, layout, head_scales=head_scales), Gpu(device, capability)
    name = "triton" if wanted == "auto" else wanted
    try:
        backend, description = ON_GPU[name](config, needs, gpu)
    except Unsupported as error:
        raise ConfigError(f"--attention-backend {name}: {error}; {_alternatives(name, config, needs, gpu)}") from None
    reason = "the device is a GPU" if wanted == "auto" else "requested"
    graphs = _describe_graphs(backend, config)
    log.info("attention backend", name=description, reason=reason, graphs=graphs)
    return backend


def fit_block_size(config: EngineConfig, layout: KVLayout, backends: Sequence[AttentionBackend]) -> int:
    """Return the tokens of the pool's blocks: ``block_size``, or the next size that the kernels can read.

    Raises:
        ConfigError: the kernels can read none of the sizes up to MAX_BLOCK_SIZE.
    """
    if not layout.groups:
        return config.block_size
    for size in range(layout.block_size, MAX_BLOCK_SIZE + 1):
        if all(backend.supports.kernel_block_size(size) for backend in backends):
            break
    else:
        raise ConfigError(
            f"--block-size {config.block_size}: the attention kernels read {_describe_blocks(backends)}, and none of "
            f"these sizes is between {config.block_size} and {MAX_BLOCK_SIZE}: lower --block-size"
        )
    if size != layout.block_size:
        reason = f"the attention kernels read {_describe_blocks(backends)}"
        log.warning("KV blocks are larger than --block-size", wanted=config.block_size, block_size=size, reason=reason)
    return size


def _describe_blocks(backends: Sequence[AttentionBackend]) -> str:
    return " and ".join(
        f"blocks of {backend.supports.describe_block_sizes()} tokens ({backend.name})"
        for backend in {backend.name: backend for backend in backends}.values()
        if backend.supports.describe_block_sizes()
    )


def _cpu(config: EngineConfig) -> AttentionBackend:
    from quire.worker_proc.attention.cpu import CpuBackend

    backend = CpuBackend(deterministic=config.deterministic)
    threads = torch.get_num_threads()
    log.info("attention backend", name=backend.describe(), reason="the device is a CPU", threads=threads)
    return backend


def _triton(config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen:
    from quire.worker_proc.attention.triton_backend import TritonBackend

    _require(TritonBackend.supports, needs, gpu)
    try:
        backend = TritonBackend(max_rows=config.max_num_seqs, deterministic=config.deterministic)
    except RuntimeError as error:
        raise Unsupported(str(error)) from None
    return backend, ("triton (fixed split of keys)" if config.deterministic else "triton")


def _flashinfer(config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen:
    from quire.worker_proc.attention import flashinfer_backend

    _require(flashinfer_backend.FlashInferBackend.supports, needs, gpu)
    try:
        backend = flashinfer_backend.FlashInferBackend(gpu.device)
    except IMPORT_FAILURES as error:
        raise Unsupported(f"cannot load the library ({error}): {install_command('flashinfer')}") from None
    mebibytes = flashinfer_backend.WORKSPACE_BYTES // 2**20
    return backend, f"flashinfer (workspace {mebibytes} MiB; kernels are compiled when first used)"


def _flash_attn(config: EngineConfig, needs: Needs, gpu: Gpu) -> Chosen:
    """Choose the first version of the library that is installed and supports the needed features."""
    from quire.worker_proc.attention.flash_attn_backend import VERSIONS, FlashAttnBackend

    reasons = []
    for version in VERSIONS:
        try:
            _require(version.supports, needs, gpu)
            library = version()
        except IMPORT_FAILURES as error:
            reasons.append(f"{version.name}: cannot load the library ({error})")
        except Unsupported as error:
            reasons.append(f"{version.name}: {error}")
        else:
            return FlashAttnBackend(library), f"flash_attn ({library.name})"
    raise Unsupported("; ".join(reasons) + f" ({install_command('flash-attn')} installs version 2)")


ON_GPU: dict[str, BackendFactory] = {"triton": _triton, "flashinfer": _flashinfer, "flash_attn": _flash_attn}


def _require(supports: Supports, needs: Needs, gpu: Gpu) -> None:
    lacks = supports.lacks(needs, gpu.capability)
    if lacks:
        raise Unsupported(f"does not support {', '.join(lacks)}")


def _alternatives(rejected: str, config: EngineConfig, needs: Needs, gpu: Gpu) -> str:
    """Return the usable backends, for an error message. Imports their libraries, so call it only on the error path."""
    usable = []
    for name, factory in ON_GPU.items():
        if name != rejected:
            try:
                factory(config, needs, gpu)
            except Unsupported:
                continue
            usable.append(name)
    return f"usable backends: {', '.join(usable)}" if usable else "no other backend is usable"


def _describe_graphs(backend: AttentionBackend, config: EngineConfig) -> str:
    if config.enforce_eager:
        return "no CUDA graphs (--enforce-eager)"
    if backend.needs_host_lengths:
        return "no CUDA graphs: the backend needs lengths on the host"
    return "steady decode uses CUDA graphs"
