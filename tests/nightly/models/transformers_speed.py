"""CPU time of a step by transformers' class of a model, divided by that of Quire's own code, in one process.

A Llama of 47 M random weights in float32, with one thread: decode steps of 16 rows and of one, and prefills of 448
tokens. Blocks of steps take turns, because the machine's load changes; the ratios are of medians.

usage: python -P tests/nightly/models/transformers_speed.py [--rounds 8]
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read when torch is imported
sys.path.extend(map(str, (Path(__file__).resolve().parents[2] / "support").iterdir()))

import torch
from inprocess import InProcessEngine
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
ENGINE = {"block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 32, "max_model_len": 1024}
STEPS = 14
WARM_UP = 4
MOST = {"decode of 16 rows": 1.4, "prefill of 448 tokens": 1.1}
"""Ratios that a run must not exceed."""


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def decode(engine: InProcessEngine, prompts: list[list[int]], name: str) -> float:
    """Return the median of the steps of some requests that decode."""
    for index, prompt in enumerate(prompts):
        engine.add(f"{name} {index}", prompt, max_tokens=STEPS + WARM_UP + 2)
    for _ in range(WARM_UP):
        engine.step()
    found = statistics.median(cpu_ms(engine.step) for _ in range(STEPS))
    engine.run()
    return found


def prefill(engine: InProcessEngine, prompts: list[list[int]], name: str) -> float:
    engine.add(name, prompts[0], max_tokens=1)
    return cpu_ms(engine.run)


CASES = {
    "decode of 16 rows": (decode, 16, 24),
    "decode of one row": (decode, 1, 24),
    "prefill of 448 tokens": (prefill, 1, 448),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare transformers' class of a model with Quire's own code.")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of each kind (default: 8)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draw = random.Random(0)
    times: dict[str, dict[str, list[float]]] = {case: {"native": [], "transformers": []} for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().save_pretrained(folder)
        engines = {
            name: InProcessEngine(Path(folder), model_impl=name, check=False, num_blocks_override=512, **ENGINE)
            for name in ("native", "transformers")
        }
        for each in range(rounds):
            for case, (measure, rows, length) in CASES.items():
                prompts = [[draw.randrange(3, 8192) for _ in range(length)] for _ in range(rows)]
                for name, engine in engines.items():
                    times[case][name].append(measure(engine, prompts, f"{case} {each}"))
    ratios = {}
    for case, found in times.items():
        native, other = (statistics.median(found[name]) for name in ("native", "transformers"))
        ratios[case] = round(other / native, 3)
        smallest = min(found["transformers"]) / min(found["native"])
        print(f"{case:24} {native:8.2f} ms  {other:8.2f} ms  ratio {ratios[case]:.2f}, of the smallest {smallest:.2f}")
    print(json.dumps({"rounds": rounds, "ratios": ratios}))
    return 1 if any(ratios[case] > most for case, most in MOST.items()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
