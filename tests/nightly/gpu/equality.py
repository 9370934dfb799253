"""The whole engine on a GPU compared with transformers: equal greedy tokens of tiny checkpoints in several modes.

A program instead of a test file: ``check.py`` starts it once per family, on machines that may lack pytest. It prints a
line of JSON per mode. With ``--dry-run`` the same runner runs on a CPU, with its kernels in Triton's interpreter.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from inprocess import InProcessEngine

from quire.protocol.model.kv_layout import kv_layout
from quire.worker_proc.attention.triton_backend import TritonBackend
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.models.triton_ops import TritonOps
from quire.worker_proc.startup.loader import load_weights

NUM_TOKENS = 12
LENGTHS = (1, 3, 17, 30, 45)
CANDIDATES = 4
"""Maximum number of prompts tried per length, until all tokens of one are decided clearly; the best one is used."""

MARGINS = {"float32": 2e-3, "bfloat16": 0.15}
"""Minimum lead of the best logit, in standard deviations of its row: with less, rounding may decide."""

MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 16},
    "preempted": {"num_blocks_override": 5},
}
PREEMPTED = ("llama", "qwen3")
"""Families with one KV group, for which five blocks of 16 are enough for a single request."""

MORE_ROWS_THAN_FIT = 14
"""Tokens of each prompt: one block at admission, two later."""


class InterpretedEngine(InProcessEngine):
    """An engine with the GPU's runner on the CPU."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        config = self.config
        cpu = torch.device("cpu")
        with torch.inference_mode():
            model = build_model(config.model, torch.float32, cpu, config.max_model_len, ops=TritonOps())
            load_weights(model, folder, torch.float32, progress=False)
        layout = kv_layout(config.model, config.block_size, "float32")
        blocks = config.num_blocks_override + 1
        self.runner = ModelRunner(config, layout, blocks, model, TritonBackend(config.max_num_seqs), cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the engine on a GPU with transformers.")
    parser.add_argument("family")
    parser.add_argument("--dtype", choices=tuple(MARGINS), default="float32")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as scratch:
        folder = Path(scratch)
        model = make_checkpoint(folder, args.family, dtype=getattr(torch, args.dtype))
        for found in compare(model.float(), folder, args.family, args.dtype, args.dry_run):
            print(json.dumps(found), flush=True)


def compare(model: Any, folder: Path, family: str, dtype: str, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Yield one result per mode. ``model``: transformers' model, in float32."""
    num_tokens = 3 if dry_run else NUM_TOKENS
    mixed = expected_answers(model, LENGTHS[1:3] if dry_run else LENGTHS, num_tokens, MARGINS[dtype])
    equal = {} if dry_run else expected_answers(model, [MORE_ROWS_THAN_FIT] * 4, num_tokens, MARGINS[dtype])
    for mode, settings in MODES.items():
        preempted = mode == "preempted"
        if (preempted and family not in PREEMPTED) or (dry_run and mode != "chunks"):
            continue
        started = time.monotonic()
        answers = equal if preempted else mixed
        captured = False
        try:
            engine = make_engine(folder, dtype, settings, dry_run)
            steady = engine.runner.steady
            captured = steady is not None and not steady.graphs.eager
            problem = problem_of(engine, answers, num_tokens, preempted)
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        found = {"case": f"{family} {dtype} {mode}", "ok": not problem, "problem": problem, "captured": captured}
        yield found | {"seconds": time.monotonic() - started}


def make_engine(folder: Path, dtype: str, settings: dict[str, Any], dry_run: bool) -> InProcessEngine:
    common = {"dtype": dtype, "kv_cache_dtype": dtype, "max_num_seqs": 4, "max_model_len": 128} | settings
    return InterpretedEngine(folder, **common) if dry_run else InProcessEngine(folder, device="cuda", **common)


def problem_of(
    engine: InProcessEngine, answers: dict[tuple[int, ...], list[int]], num_tokens: int, preempted: bool
) -> str:
    """Run the prompts, and describe the first difference from ``answers``, or return an empty string."""
    if sum(map(len, answers.values())) < len(answers) * num_tokens // 4:
        return "too few tokens are decided clearly enough for a comparison"
    for index, prompt in enumerate(answers):
        engine.add(str(index), list(prompt), max_tokens=num_tokens)
    got = engine.run()
    for index, (prompt, expected) in enumerate(answers.items()):
        answer = got[str(index)]
        if len(answer.tokens) != num_tokens or answer.tokens[: len(expected)] != expected:
            return f"prompt of {len(prompt)} tokens: {answer.tokens} instead of {expected} ({answer.rejected})"
    if preempted and not engine.statistics().num_preemptions:
        return "no request was preempted"
    return ""


def expected_answers(
    model: Any, lengths: Sequence[int], num_tokens: int, margin: float
) -> dict[tuple[int, ...], list[int]]:
    """Return prompts of these lengths with greedy outputs, up to the first token decided by less than ``margin``."""
    draw = random.Random(5)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    found: dict[tuple[int, ...], list[int]] = {}
    for length in lengths:
        tried: dict[tuple[int, ...], list[int]] = {}
        for _ in range(CANDIDATES):
            prompt = [draw.randrange(3, vocab_size) for _ in range(length)]
            tried[tuple(prompt)] = clear_answer(model, prompt, num_tokens, margin)
            if len(tried[tuple(prompt)]) == num_tokens:
                break
        best = max(tried, key=lambda one: len(tried[one]))
        found[best] = tried[best]
    return found


@torch.inference_mode()
def clear_answer(model: Any, prompt: list[int], num_tokens: int, margin: float) -> list[int]:
    """Compute greedy tokens by whole forward passes, up to the first with a lead of less than ``margin``."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1].float()
        best = logits.topk(2)
        if best.values[0] - best.values[1] < margin * logits.std():
            break
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


if __name__ == "__main__":
    main()
