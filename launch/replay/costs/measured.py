"""The folder of a measured run as a cost: its own profile of layers, for the model and the chip that it names."""

import json
from pathlib import Path
from typing import Any

import yaml

from quire.launch.replay.costs.csv_table import find_file, read_text
from quire.launch.replay.costs.layers import DENSE, LayerProfileCost, ProfiledMachine, captured_sizes
from quire.launch.replay.costs.link import Link
from quire.launch.replay.costs.models import find_model
from quire.launch.replay.costs.sizes import room_for_kv
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig

UTILIZATION = 0.9
_PCIE = Link(25e9, 1e-5)
"""Where the folder does not tell what is between its chips."""


def is_layer_profile(folder: Path) -> bool:
    return find_file(folder, DENSE) is not None


def load_layer_profile(
    folder: Path, model: ModelConfig | None = None, tensor_parallel_size: int | None = None
) -> LayerProfileCost:
    """
    Args:
        model: None: the one that ``meta.json`` or ``profile_meta.yaml`` names.
        tensor_parallel_size: None: what the run had. Another one cannot be: the layers were measured as cut for that.

    Raises:
        ConfigError: a file is missing or broken, the model is not known, or the profile is of another size.
    """
    meta, profile = _mapping(folder, "meta.json"), _mapping(folder, "profile_meta.yaml")
    asked = _part(meta, "engine_kwargs")
    ranks = _number(asked.get("tensor_parallel_size"), 1)
    if tensor_parallel_size is not None and tensor_parallel_size != ranks:
        raise ConfigError(
            f"{folder}: its layers were measured as cut for {ranks} ranks; tensor_parallel_size={tensor_parallel_size} "
            f"needs a profile of its own, or roofline:CONFIG,CHIP"
        )
    if model is None:
        name = meta.get("model") or profile.get("model")
        if not isinstance(name, str):
            raise ConfigError(
                f"{folder}: neither meta.json nor profile_meta.yaml names the model; say table:DIR,CONFIG"
            )
        config = find_file(folder, "model_config.json")
        model = find_model(str(config) if config is not None else name)
    machine = ProfiledMachine(
        model=model,
        name=str(profile.get("gpu") or _part(meta, "hardware").get("device_name") or folder.name),
        num_ranks=ranks,
        captured=_captured(meta, profile),
        link=_link(folder),
        skew=_skew(profile, ranks),
        kv_bytes=_kv_bytes(folder, meta, model, ranks),
    )
    return LayerProfileCost(folder, machine)


def _captured(meta: dict[str, Any], profile: dict[str, Any]) -> list[int]:
    """Of the run; where it does not tell, by vLLM's rule. None where it ran eagerly."""
    asked, resolved = _part(meta, "engine_kwargs"), _part(meta, "resolved_config")
    if asked.get("enforce_eager") or _part(resolved, "model_config").get("enforce_eager"):
        return []
    sizes = _part(resolved, "compilation_config").get("cudagraph_capture_sizes")
    if isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes):
        return sorted(sizes)
    most = _number(asked.get("max_num_seqs"), _number(_part(profile, "engine_effective").get("max_num_seqs"), 256))
    return captured_sizes(min(2 * most, 512))


def _skew(profile: dict[str, Any], ranks: int) -> float:
    """As it was measured with the profile, over all batches; 0 where it was not."""
    fit = _part(profile, "skew_fit")
    per_rank = {str(key): part for key, part in _part(fit, "per_tp").items()}
    told = _part(per_rank, str(ranks)) or fit
    skew = told.get("alpha_default")
    return float(skew) if isinstance(skew, (int, float)) and 0 <= skew <= 1 else 0.0


def _link(folder: Path) -> Link:
    """``link_bw`` in GB/s and ``link_latency`` in nanoseconds, of the cluster that ``config.json`` describes."""
    cluster = _mapping(folder, "config.json")
    bandwidth, latency = cluster.get("link_bw"), cluster.get("link_latency")
    if isinstance(bandwidth, (int, float)) and isinstance(latency, (int, float)) and bandwidth > 0 and latency >= 0:
        return Link(bandwidth * 1e9, latency * 1e-9)
    return _PCIE


def _kv_bytes(folder: Path, meta: dict[str, Any], model: ModelConfig, ranks: int) -> int:
    """What the run had; else what its chip leaves."""
    cache = _part(meta, "kv_cache")
    blocks, block_size = cache.get("num_gpu_blocks"), cache.get("block_size")
    if isinstance(blocks, int) and isinstance(block_size, int) and min(blocks, block_size) > 0:
        return blocks * kv_layout(model, block_size, model.dtype).block_bytes
    memory = _part(meta, "hardware").get("device_total_memory_bytes")
    if not isinstance(memory, int):
        memory = _npu_memory(_mapping(folder, "config.json"))
    share = cache.get("gpu_memory_utilization")
    share = share if isinstance(share, float) and 0 < share <= 1 else UTILIZATION
    return room_for_kv(model, memory * share, ranks) if memory else 0


def _npu_memory(cluster: dict[str, Any]) -> int:
    """Bytes of one chip in ``config.json``; 0 where it does not tell."""
    try:
        return int(cluster["nodes"][0]["instances"][0]["npu_mem"]["mem_size"] * 2**30)
    except (KeyError, IndexError, TypeError):
        return 0


def _mapping(folder: Path, name: str) -> dict[str, Any]:
    """The file's contents; empty where there is no such file."""
    path = find_file(folder, name)
    if path is None:
        return {}
    text = read_text(path)
    try:
        raw = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping")
    return raw


def _part(whole: dict[str, Any], key: str) -> dict[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise
