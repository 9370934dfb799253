"""``quire bench engine``: tokens per second of the whole engine, offline, and of peers in the same run.

One round is ``--num-requests`` random prompts at once, greedy, with exactly ``--output-len`` output tokens each.
Rounds of Quire and of each peer alternate on the same prompts, so that other load on the machine slows all of them.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tqdm import tqdm

from quire.bench.adapters import write_adapters
from quire.bench.measure.report import RunReport, Table, rounded
from quire.bench.measure.shapes import find_shape
from quire.bench.peer_files import PeerFiles
from quire.bench.peers import Peer, PeerChoice, PeerFailed, find_driver, parse_peer
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.launch.offline.lora_request import LoRARequest
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.process.host_limits import usable_cores
from quire.protocol.request.sampling_params import SamplingParams

# Lower ids are special tokens in most checkpoints.
LOW_ID = 3
WARM_UP_LENGTH = 16
DRIVER = "engine.py"
# If other processes keep more cores than this busy, the figures measure the machine more than the engine.
QUIET_CORES = 0.2
BUSY_SCRIPT = """
import os
parent = os.getppid()
print("busy", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]


@dataclass(slots=True)
class Contestant:
    """An engine under test, Quire or a peer, and its measurements.

    Attributes:
        generate: generates a number of tokens for each prompt; raises PeerFailed.
        seconds: wall time of each timed round.
        busy_seconds: wall time of each round beside busy processes.
        others_cores: cores kept busy by other processes, in the prefill round and each timed round. The benchmark's
            own busy processes are not counted.
        error: why there is no result, or None.
    """

    name: str
    generate: Generate
    ready_s: float
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    prefill_s: float | None = None
    error: str | None = None

    def results(self, num_tokens: int, prompt_tokens: int, num_requests: int) -> dict[str, Any]:
        """Return the figures. ``tokens_per_s``: generated tokens per second of a whole round; median of the rounds.

        ``busy_by_quiet``: the same beside busy processes, divided by that of the other rounds.
        """
        if self.error is not None:
            return {"error": self.error}
        rates = [num_tokens / seconds for seconds in self.seconds]
        median_s = statistics.median(self.seconds)
        found: dict[str, Any] = {
            "tokens_per_s": num_tokens / median_s,
            "tokens_per_s_rounds": rates,
            "ready_s": self.ready_s,
            "others_cores": self.others_cores,
            **self.facts,
        }
        if self.busy_seconds:
            found["busy_tokens_per_s"] = num_tokens / statistics.median(self.busy_seconds)
            found["busy_tokens_per_s_rounds"] = [num_tokens / seconds for seconds in self.busy_seconds]
            found["busy_by_quiet"] = found["busy_tokens_per_s"] / found["tokens_per_s"]
        if self.prefill_s is not None:
            found |= {"prefill_s": self.prefill_s, "prefill_tokens_per_s": prompt_tokens / self.prefill_s}
            if num_tokens > num_requests and median_s > self.prefill_s:
                found["decode_tokens_per_s"] = (num_tokens - num_requests) / (median_s - self.prefill_s)
        return found


class OtherProcessesClock:
    """Measurement of the cores that other processes keep busy, from its creation to ``stop``."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._all, self._own = _busy_seconds(), _own_seconds()

    def stop(self) -> tuple[float, float]:
        """Return (wall seconds, mean number of cores kept busy by other processes)."""
        wall = time.perf_counter() - self._start
        others = (_busy_seconds() - self._all) - (_own_seconds() - self._own)
        return wall, round(max(0.0, others / wall), 2)


def run(args: argparse.Namespace, options: EngineOptions) -> None:
    """Raises ConfigError for contradicting flags, EngineError if Quire's engine does not start."""
    peers = [parse_peer(given) for given in args.peer or []]
    _check(args, options)
    threads = args.threads or default_threads()
    # Read by torch at import in the child processes: the worker and each peer.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch, ExitStack() as stack:
        model = find_model(options.model) if args.shape is None else None
        folder, exporter = args.peer_files or Path(scratch), args.openvino_exporter
        files = PeerFiles(folder, model, args.shape, options.seed, peers, exporter, args.peer_driver)
        config = _engine_config(args, _options_for_adapters(args, options), files)
        loaded = [(peer, files.of_peer(peer)) for peer in peers]
        began = time.perf_counter()
        llm = stack.enter_context(LLM.from_config(config, quiet=True))
        ours = Contestant("quire", partial(_generate, llm, []), time.perf_counter() - began)
        ours_too = _with_adapters(args, llm, ours.ready_s, Path(scratch))
        contestants = [ours, *ours_too, *(_start_peer(args, peer, path, threads, stack) for peer, path in loaded)]
        before = llm.statistics()
        _measure(contestants, args, config.model.vocab_size)
        after = llm.statistics()
        ours.facts |= {
            "steps": after.num_steps - before.num_steps,
            "preemptions": after.num_preemptions - before.num_preemptions,
            "cached_tokens": after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens,
        }
    _report(args, config, options.quantization, threads, contestants).publish(args.json)


def default_threads() -> int:
    """Return the worker's default: OMP_NUM_THREADS, or one thread per available physical core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return usable_cores()


def make_prompts(seed: int, num_prompts: int, length: int, vocab_size: int) -> Prompts:
    """Return prompts of random token ids. Each round has its own seed, so that it has no prefix cache hits."""
    draw = random.Random(seed)
    return [[draw.randrange(LOW_ID, vocab_size) for _ in range(length)] for _ in range(num_prompts)]


def _check(args: argparse.Namespace, options: EngineOptions) -> None:
    for name, low in (
        ("num_requests", 1),
        ("input_len", 1),
        ("output_len", 1),
        ("rounds", 1),
        ("busy", 0),
        ("adapters", 0),
    ):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low} (got {getattr(args, name)})")
    if not 1 <= args.adapter_rank <= 1024:
        raise ConfigError(f"--adapter-rank must be from 1 to 1024 (got {args.adapter_rank})")
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ConfigError(f"--threads must be from 1 to 1024 (got {args.threads})")
    if args.shape is not None and options.model is not None:
        raise ConfigError("MODEL and --shape cannot be combined")


def _engine_config(args: argparse.Namespace, options: EngineOptions, files: PeerFiles) -> EngineConfig:
    """Return the configuration of a checkpoint, or of a shape with random weights. If peers are to load these, they
    are written as a checkpoint."""
    if args.shape is not None and not args.peer and not args.gguf:
        config = make_engine_config(options, model=find_shape(args.shape))
    else:
        if args.shape is not None:
            find_shape(args.shape)
            options = msgspec.structs.replace(options, load_format="auto")
        elif options.load_format == "dummy" and (args.peer or args.gguf):
            flag = "--peer" if args.peer else "--gguf"
            raise ConfigError(f"--load-format dummy cannot be combined with {flag}, which loads weights: use --shape")
        config = make_engine_config(options, folder=files.gguf(args.gguf) if args.gguf else files.checkpoint())
    total = args.input_len + args.output_len
    if total > config.max_model_len:
        raise ConfigError(
            f"--input-len plus --output-len must be at most the model's context of {config.max_model_len} (got {total})"
        )
    return config


def _options_for_adapters(args: argparse.Namespace, options: EngineOptions) -> EngineOptions:
    if not args.adapters:
        return options
    rank = max(options.max_lora_rank, args.adapter_rank)
    return msgspec.structs.replace(options, enable_lora=True, max_lora_rank=rank)


def _with_adapters(args: argparse.Namespace, llm: LLM, ready_s: float, folder: Path) -> list[Contestant]:
    """Return the same engine with adapters, of which each request has one; nothing without ``--adapters``."""
    if not args.adapters:
        return []
    adapters = write_adapters(folder, llm.config.model, args.adapters, args.adapter_rank, args.prompt_seed)
    facts = {"adapters": args.adapters, "adapter_rank": args.adapter_rank}
    return [Contestant("quire with adapters", partial(_generate, llm, adapters), ready_s, facts)]


def _generate(llm: LLM, adapters: list[LoRARequest], prompts: Prompts, output_len: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    chosen = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
    outputs = llm.generate(prompts, params, lora_request=chosen)
    short = [len(o.outputs[0].token_ids) for o in outputs if len(o.outputs[0].token_ids) != output_len]
    if short:
        raise EngineError(f"{len(short)} outputs are shorter than {output_len} tokens: is the KV cache too small?")


def _start_peer(args: argparse.Namespace, choice: PeerChoice, path: Path, threads: int, stack: ExitStack) -> Contestant:
    driver = find_driver(args.peer_driver, DRIVER)
    round_size = (args.num_requests, args.input_len + max(args.output_len, WARM_UP_LENGTH))
    peer = Peer(choice.python, driver, path, choice.name, args.peer_dtype, threads, round_size)
    stack.callback(peer.close)
    contestant = Contestant(choice.label, peer.generate, 0.0)
    try:
        contestant.ready_s, contestant.facts = peer.wait_ready()
    except PeerFailed as error:
        contestant.error = str(error)
    return contestant


def _measure(contestants: list[Contestant], args: argparse.Namespace, vocab_size: int) -> None:
    """Run a warm-up, a round with prefill only, then the timed rounds. A peer that fails is left out afterwards."""
    timed = [("timed", args.output_len), ("busy", args.output_len)] if args.busy else [("timed", args.output_len)]
    rounds = [("warm-up", min(args.output_len, WARM_UP_LENGTH)), ("prefill", 1), *timed * args.rounds]
    with tqdm(total=len(rounds) * len(contestants), desc="Rounds", file=sys.stderr, leave=False) as bar:
        for index, (kind, output_len) in enumerate(rounds):
            prompts = make_prompts(args.prompt_seed + index, args.num_requests, args.input_len, vocab_size)
            for contestant in contestants:
                if contestant.error is None:
                    bar.set_postfix_str(contestant.name)
                    with busy_processes(args.busy if kind == "busy" else 0):
                        _measure_round(contestant, prompts, output_len, kind)
                bar.update()


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run processes that only compute, each with one thread. They end with this process too."""
    command = [sys.executable, "-I", "-S", "-c", BUSY_SCRIPT]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += (subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count))
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _measure_round(contestant: Contestant, prompts: Prompts, output_len: int, kind: str) -> None:
    clock = OtherProcessesClock()
    try:
        contestant.generate(prompts, output_len)
    except PeerFailed as error:
        contestant.error = str(error)
        return
    wall, others = clock.stop()
    if kind == "warm-up":
        return
    contestant.others_cores.append(others)
    if kind == "prefill":
        contestant.prefill_s = wall
    else:
        (contestant.busy_seconds if kind == "busy" else contestant.seconds).append(wall)


def _report(
    args: argparse.Namespace, config: EngineConfig, quantization: str, threads: int, contestants: list[Contestant]
) -> RunReport:
    num_tokens = args.num_requests * args.output_len
    results = {
        c.name: c.results(num_tokens, args.num_requests * args.input_len, args.num_requests) for c in contestants
    }
    ours = results["quire"]["tokens_per_s"]
    for found in results.values():
        if "tokens_per_s" in found:
            found["ours_by_this"] = ours / found["tokens_per_s"]
    flags = ("num_requests", "input_len", "output_len", "rounds", "gguf", "busy")
    configured = ("dtype", "device", "async_scheduling", "max_num_seqs", "max_num_batched_tokens", "block_size")
    settings = {"model": args.shape or "checkpoint", "threads": threads, "quantization": quantization}
    settings |= {name: getattr(args, name) for name in flags} | {name: getattr(config, name) for name in configured}
    report = RunReport("engine", settings, rounded(results, 3))
    columns = ["tokens_per_s", "decode_tokens_per_s", "prefill_s", "ready_s", "ours_by_this"]
    title = f"{settings['model']}, {args.num_requests} requests, {args.input_len} + {args.output_len} tokens"
    headers = ["tokens/s", "decode tokens/s", "prefill s", "ready s", "quire / this"]
    if args.busy:
        columns += ["busy_tokens_per_s", "busy_by_quiet"]
        headers += ["busy tokens/s", "busy / quiet"]
    rows = [(name, [found.get(column) for column in columns]) for name, found in results.items()]
    report.tables.append(Table(title, headers, rows))
    facts = contestants[0].facts
    report.notes.append(f"{facts['steps']} steps, {facts['preemptions']} preemptions, {threads} threads")
    report.notes += [f"{c.name} failed: {c.error}" for c in contestants if c.error is not None]
    busiest = max((o for c in contestants for o in c.others_cores), default=0.0)
    if busiest > QUIET_CORES:
        report.notes.append(f"other processes used up to {busiest:.2f} cores: compare ratios only")
    return report


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_seconds() -> float:
    """Return CPU seconds of this process and its descendants, including those that have exited."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
