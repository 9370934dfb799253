"""The runs of vLLM that LLMServingSim's authors measured: requests with their tokens, and the engine's settings."""

import gzip
import json
from array import array
from pathlib import Path
from typing import Any

from quire.replay.formats.content import chain_ids
from quire.replay.workload.workload import Call, ContentIds, Workload

SETTINGS = {
    "rtxpro6000_llama31-8b": {"max_num_seqs": "128", "num_usable_blocks": "36115"},
    "rtx4090_llama31-8b": {"max_num_seqs": "256", "num_usable_blocks": "2587", "max_model_len": "32768"},
}
"""Settings from each folder's meta.json; the number of blocks of the first run is what 90 % of its memory leaves."""
COMMON = {"like": "vllm-0.19.0", "max_num_batched_tokens": "2048", "block_size": "16"}


def measured_settings(folder: Path) -> dict[str, str]:
    """Return the settings of a run: those above, or else those that its meta.json has."""
    if folder.name in SETTINGS:
        return COMMON | SETTINGS[folder.name]
    with gzip.open(folder / "meta.json.gz", "rt", encoding="utf-8") as file:
        meta: dict[str, Any] = json.load(file)
    names = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "max_num_seqs", "max_model_len")
    given = {name: str(meta["engine_kwargs"][name]) for name in names if meta["engine_kwargs"].get(name) is not None}
    blocks = meta.get("kv_cache", {}).get("num_gpu_blocks")
    return COMMON | given | ({"num_usable_blocks": str(blocks - 1)} if blocks else {})


def measured_workload(folder: Path) -> Workload:
    """Arrival times are those that the load generator planned."""
    calls = []
    with gzip.open(folder / "workload.jsonl.gz", "rt", encoding="utf-8") as file:
        for number, line in enumerate(map(json.loads, file)):
            content = ContentIds(chain_ids(array("i", line["input_tok_ids"]), 16), 16)
            times = line["arrival_time_ns"] / 1e9
            calls.append(Call(number, f"{number}", times, line["input_toks"], line["output_toks"], content))
    return Workload("measured", str(folder), calls)
