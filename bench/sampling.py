"""``quire bench sampling``: cost of logits processors, proposers and grammars, and speed-up by draft tokens.

Section ``worker`` runs in its own process (``quire.bench.worker.sampling``). Sections ``masks`` and ``fall``
measure code of the scheduler. Section ``repeating`` alternates whole engines with and without draft tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from quire.bench.measure.report import RunReport, Table, flat, rounded
from quire.bench.measure.shapes import find_shape
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.launch.supervision.supervisor import WORKER_ENVIRONMENT
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.features.drafts.draft_state import DraftState
from quire.scheduler_proc.features.drafts.drafting import DraftController
from quire.scheduler_proc.structured.backend import GrammarPosition
from quire.scheduler_proc.structured.backends import make_backend

SCHEMAS = (
    '{"type":"object","required":["name","tags","size"],"additionalProperties":false,"properties":{'
    '"name":{"type":"string","maxLength":40},"size":{"type":"integer","minimum":0},'
    '"tags":{"type":"array","items":{"enum":["red","green","blue"]},"minItems":1,"maxItems":6}}}',
    '{"type":"array","items":{"type":"string","pattern":"^[a-z]{2,12}$"},"minItems":1,"maxItems":8}',
    '{"type":"object","properties":{"a":{"anyOf":[{"type":"number"},{"type":"boolean"}]},"b":{"type":"string"}}}',
)
MASK_ROWS = 48
MASK_TOKENS = 24
MAX_DRAFTS = 5
MAX_STEPS = 1000
NUM_REPEATED_TOKENS = 3


def run(args: argparse.Namespace) -> None:
    """Raises ConfigError for an unknown section, EngineError if a process fails."""
    sections: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "worker": worker,
        "masks": masks,
        "fall": fall,
        "repeating": repeating,
    }
    wanted = args.sections.split(",") if args.sections else list(sections)
    unknown = [name for name in wanted if name not in sections]
    if unknown:
        raise ConfigError(f"--sections: unknown section {unknown[0]!r} (known: {', '.join(sections)})")
    for flag in ("rows", "vocab_size", "repeats", "output_len", "rounds"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1 (got {getattr(args, flag)})")
    results = {name: sections[name](args) for name in wanted}
    settings = {"rows": args.rows, "vocab_size": args.vocab_size, "repeats": args.repeats, "model": args.model}
    report = RunReport("sampling", settings, rounded(results, 4))
    for name, found in results.items():
        report.tables.append(Table(name, ["figure"], [(key, [value]) for key, value in flat(found, " ").items()]))
    report.publish(args.json)


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """Measure CPU time of one step's sampling, plain and with all features, and of the proposers."""
    shape = msgspec.structs.replace(find_shape("tiny"), vocab_size=args.vocab_size, eos_token_ids=[2])
    config = make_engine_config(EngineOptions(device="cpu"), model=shape)
    command = [sys.executable, "-P", "-m", "quire.bench.worker.sampling"]
    command += ["--rows", str(args.rows), "--repeats", str(args.repeats)]
    environment = os.environ | WORKER_ENVIRONMENT  # as for a serving worker
    done = subprocess.run(command, input=msgspec.json.encode(config), stdout=subprocess.PIPE, env=environment)
    if done.returncode:
        raise EngineError(f"measuring process exited with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def masks(args: argparse.Namespace) -> dict[str, Any]:
    """Measure CPU time per row of a token bitmask, along random outputs that the grammars allow, and of compiling."""
    folder = find_model(args.model)
    config = make_engine_config(EngineOptions(device="cpu"), folder=folder)
    backend = make_backend(config)
    width = -(-config.model.vocab_size // 32)
    compile_ms, grammars = [], []
    for schema in SCHEMAS:
        start = time.process_time()
        grammars.append(backend.compile(StructuredOutputs(json=schema)))
        compile_ms.append((time.process_time() - start) * 1e3)
    # As for live requests: those with the same schema share its grammar.
    matchers: list[GrammarPosition] = [grammars[index % len(grammars)].matcher() for index in range(MASK_ROWS)]
    rows = np.zeros((MASK_ROWS, width), np.int32)
    rng = np.random.default_rng(0)
    row_us = []
    for _ in range(MASK_TOKENS):
        start = time.process_time()
        backend.fill([(matcher, row) for row, matcher in enumerate(matchers)], rows)
        row_us.append((time.process_time() - start) * 1e6 / MASK_ROWS)
        for matcher, mask in zip(matchers, rows, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, config.model.eos_token_ids)]
            if len(allowed):
                matcher.accept(int(rng.choice(allowed)))
    return {
        "vocab_size": config.model.vocab_size,
        "compile_ms": statistics.median(compile_ms),
        "fill_first_us_per_row": row_us[0],
        "fill_us_per_row": statistics.median(row_us),
    }


def fall(args: argparse.Namespace) -> dict[str, Any]:
    """Count the steps until requests whose draft tokens are never accepted get none: for draft tokens that cost little,
    and for draft tokens that cost as much as a step."""
    return {name: _steps_to_zero(per_token) for name, per_token in (("cheap_drafts", 0.01), ("dear_drafts", 1.0))}


def _steps_to_zero(per_token: float) -> int:
    controller = DraftController(MAX_DRAFTS)
    states = [DraftState() for _ in range(4)]
    for step in range(1, MAX_STEPS):
        numbers = list(controller.choose(states, len(states), step))
        if not any(numbers):
            return step - 1
        for state, number in zip(states, numbers, strict=True):
            controller.drafts_sent(state, step)
            controller.verified(state, number, 0)
        tokens = len(states) + sum(numbers)
        controller.record_step_time(1e-2 * (1.0 + per_token * tokens), tokens, True)
    return MAX_STEPS


def repeating(args: argparse.Namespace) -> dict[str, Any]:
    """Measure steps and tokens per second of one request that repeats a few tokens, without and with draft tokens."""
    found: dict[str, Any] = {}
    for name in ("demo", *args.shape):
        with ExitStack() as stack:
            plain, drafted = (stack.enter_context(_start(name, method)) for method in ("", args.method))
            found[name] = _compare(plain, drafted, args.output_len, args.rounds)
    return found


def _start(name: str, method: str) -> LLM:
    drafts = {"method": method, "num_speculative_tokens": MAX_DRAFTS} if method else None
    options = EngineOptions(device="cpu", speculative_config=drafts, max_num_seqs=4)
    if name == "demo":
        return LLM.from_config(make_engine_config(options, folder=find_model(None)), quiet=True)
    return LLM.from_config(make_engine_config(options, model=find_shape(name)), quiet=True)


def _compare(plain: LLM, drafted: LLM, length: int, rounds: int) -> dict[str, Any]:
    """Alternate both engines on the same request. With few allowed tokens, any model repeats itself."""
    tokens = list(range(5, 5 + NUM_REPEATED_TOKENS))
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, allowed_token_ids=tokens)
    rates: list[tuple[float, float]] = []
    steps = (0, 0)
    for index in range(rounds + 1):
        one, many = (_round(llm, tokens * 4, params) for llm in (plain, drafted))
        if one[2] != many[2]:
            raise EngineError(f"outputs with and without draft tokens differ in round {index}")
        if index:
            rates.append((one[0], many[0]))
        steps = one[1], many[1]
    return {
        "tokens_per_s_plain": statistics.median(a for a, _ in rates),
        "tokens_per_s_drafted": statistics.median(b for _, b in rates),
        "speed_up": statistics.median(b / a for a, b in rates),
        "steps_plain": steps[0],
        "steps_drafted": steps[1],
        "fewer_steps": steps[0] / steps[1],
    }


def _round(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, int, list[int]]:
    """Return (tokens per second, steps, tokens)."""
    before = llm.statistics().num_steps
    start = time.perf_counter()
    output = llm.generate(prompt, params)[0].outputs[0]
    seconds = time.perf_counter() - start
    return len(output.token_ids) / seconds, llm.statistics().num_steps - before, list(output.token_ids)
