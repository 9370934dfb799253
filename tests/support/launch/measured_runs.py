"""The runs of vLLM that LLMServingSim's authors measured: requests with their tokens, and the engine's settings."""

import gzip
import json
from array import array
from pathlib import Path

from quire.launch.replay.formats.content import chain_ids
from quire.launch.replay.workload.workload import Call, Content, Workload

SETTINGS = {
    "rtxpro6000_llama31-8b": {"max_num_seqs": "128", "num_usable_blocks": "36115"},
    "rtx4090_llama31-8b": {"max_num_seqs": "256", "num_usable_blocks": "2587", "max_model_len": "32768"},
}
"""Settings from each folder's meta.json; the number of blocks of the first run is what 90 % of its memory leaves."""
COMMON = {"like": "vllm-0.19.0", "max_num_batched_tokens": "2048", "block_size": "16"}


def measured_workload(folder: Path) -> Workload:
    """Arrival times are those that the load generator planned."""
    calls = []
    with gzip.open(folder / "workload.jsonl.gz", "rt", encoding="utf-8") as file:
        for number, line in enumerate(map(json.loads, file)):
            content = Content(chain_ids(array("i", line["input_tok_ids"]), 16), 16)
            times = line["arrival_time_ns"] / 1e9
            calls.append(Call(number, f"{number}", times, line["input_toks"], line["output_toks"], content))
    return Workload("measured", str(folder), calls)
