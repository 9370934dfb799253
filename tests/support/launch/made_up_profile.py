"""A made-up layer profile with experts, of tensor-parallel degrees 1 and 2, with simple times."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path


def write_profile(folder: Path) -> None:
    """In microseconds, each of two dense layers takes 0.1 per token, experts 2 per expert and 1 per token, attention 3,
    and the head 5. Degree 2 takes half for dense layers, and has no experts. Links have 10 GB/s and 2 us.
    """
    for ranks in (1, 2):
        end = f"_tp{ranks}.csv"
        dense = [(layer, n, 0.1 * n / ranks) for layer in ("qkv_proj", "o_proj") for n in (1, 8, 64, 4096)]
        _write(folder / f"profile_dense{end}", "layer,tokens,time_us", dense)
        _write(folder / f"profile_per_sequence{end}", "layer,sequences,time_us", [("lm_head", n, 5) for n in (1, 64)])
        attention = [(0, 0, 1, 16, 3), (0, 0, 64, 16, 3), (16, 0, 0, 0, 3), (16, 0, 1, 16, 3), (16, 0, 64, 16, 3)]
        _write(folder / f"profile_attention{end}", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention)
    experts = [(n, e, 2 * e + n) for n in (1, 64, 4096) for e in (8, 64, 128)]
    _write(folder / "profile_moe.csv", "tokens,activated_experts,time_us", experts)
    (folder / "profile_meta.yaml").write_text("model: Qwen/Qwen3-30B-A3B-Instruct-2507\n")
    (folder / "config.json").write_text(json.dumps({"link_bw": 10, "link_latency": 2000, "nodes": []}))


def _write(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])
