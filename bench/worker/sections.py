"""The list of benchmark sections, in order of importance."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.bench.worker import (
    cpu_attention,
    cpu_codes,
    cpu_layers,
    cpu_lora,
    cpu_step,
    cpu_transfer,
    gpu_attention,
    gpu_kernels,
    gpu_step,
    gpu_transfer,
)
from quire.bench.worker.record import Bench


@dataclass(frozen=True, slots=True)
class BenchSection:
    """A benchmark. ``device``: cpu or cuda; ``title``: heading of its table."""

    name: str
    device: str
    title: str
    run: Callable[[Bench], None]


SECTIONS = (
    BenchSection("cpu_attention", "cpu", "decoding: rows x tokens, heads, cache", cpu_attention.cpu_attention),
    BenchSection(
        "cpu_shared_prefix", "cpu", "decoding: rows x shared tokens, heads, cache", cpu_attention.cpu_shared_prefix
    ),
    BenchSection("cpu_prefill", "cpu", "prefill: rows x tokens", cpu_attention.cpu_prefill),
    BenchSection("cpu_linear", "cpu", "products of smollm2-135m", cpu_layers.cpu_linear),
    BenchSection("cpu_quantised", "cpu", "products of one matrix by kind of weights", cpu_codes.cpu_quantised),
    BenchSection("cpu_experts", "cpu", "experts of a layer of gpt-oss-20b", cpu_layers.cpu_experts),
    BenchSection("cpu_ops", "cpu", "norms and gates of smollm2-135m", cpu_layers.cpu_ops),
    BenchSection("cpu_lora", "cpu", "LoRA adapters of rank 16 of smollm2-135m", cpu_lora.cpu_lora),
    BenchSection("cpu_step", "cpu", "decode step of smollm2-135m: rows x tokens", cpu_step.cpu_step),
    BenchSection("cpu_transfer", "cpu", "KV blocks of smollm2-135m to host memory and back", cpu_transfer.cpu_transfer),
    BenchSection("decode_attention", "cuda", "decoding: rows x tokens, heads", gpu_attention.decode_attention),
    BenchSection("uneven_attention", "cuda", "decoding, uneven rows", gpu_attention.uneven_attention),
    BenchSection("decode_step", "cuda", "decode step of llama-3.1-8b: rows x tokens", gpu_step.decode_step),
    BenchSection("steady_step", "cuda", "steady decode of qwen3-0.6b: rows x tokens", gpu_step.steady_step),
    BenchSection("cache_write", "cuda", "cache write", gpu_kernels.cache_write),
    BenchSection("prefill_attention", "cuda", "prefill: rows x computed of all", gpu_attention.prefill_attention),
    BenchSection("ops", "cuda", "norms, gates", gpu_kernels.ops),
    BenchSection("gpu_transfer", "cuda", "KV blocks of llama-3.1-8b to the host and back", gpu_transfer.gpu_transfer),
    BenchSection("sampling", "cuda", "sampling: rows x vocabulary", gpu_kernels.sampling),
)


def choose(names: list[str], devices: set[str]) -> list[BenchSection]:
    """Return the sections ``names`` in that order or, without names, all sections of the devices.

    Raises:
        ValueError: a section does not exist, or is for another device.
    """
    known = {section.name: section for section in SECTIONS if section.device in devices}
    if not names:
        return list(known.values())
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"no section {wrong[0]!r} for this device; available: {', '.join(known)}")
    return [known[name] for name in names]
