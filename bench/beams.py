"""``quire bench beams``: beam search in the engine, and the same search by a client that submits each token again.

The client's search asks for one token with log probabilities for each beam, chooses by the same rules, and submits the
prompt and the outputs so far of the next beams, which hit the prefix cache: beam search in engines without one of their
own. Rounds alternate, with the same prompts.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from quire.bench.engine import OtherProcessesClock, Prompts, make_prompts
from quire.bench.measure.report import RunReport, Table, rounded
from quire.bench.measure.shapes import find_shape
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.request.sampling_params import MAX_LOGPROBS, SamplingParams
from quire.scheduler_proc.features.beams.search import BeamSearch

Outputs = list[list[list[int]]]
"""The tokens of each output of each prompt."""


def run(args: argparse.Namespace, options: EngineOptions) -> None:
    """Raises ConfigError for a value out of range, EngineError if the engine does not start."""
    for name, low, high in (("beam_width", 1, MAX_LOGPROBS // 2), ("rounds", 1, 1000), ("num_prompts", 1, 1000)):
        if not low <= getattr(args, name) <= high:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be from {low} to {high} (got {getattr(args, name)})")
    config = _config(args, options)
    search = SamplingParams(
        use_beam_search=True, beam_width=args.beam_width, max_tokens=args.output_len, ignore_eos=True
    )
    seconds: dict[str, list[float]] = {"engine": [], "resubmission": []}
    others: list[float] = []
    num_equal = 0
    with LLM.from_config(config, quiet=True) as llm:
        ways: dict[str, Callable[[LLM, Prompts, SamplingParams], Outputs]] = {
            "engine": in_engine,
            "resubmission": by_resubmission,
        }
        for number in range(1 + args.rounds):
            prompts = make_prompts(number, args.num_prompts, args.input_len, config.model.vocab_size)
            found: dict[str, Outputs] = {}
            for name, way in ways.items():
                llm.reset_prefix_cache()
                clock = OtherProcessesClock()
                found[name] = way(llm, prompts, search)
                wall, other = clock.stop()
                if number:  # the first round warms up
                    seconds[name].append(wall)
                    others.append(other)
            num_equal += found["engine"] == found["resubmission"]
    print_report(args, config, seconds, others, num_equal)


def in_engine(llm: LLM, prompts: Prompts, search: SamplingParams) -> Outputs:
    """Search with the engine's own beams."""
    return [[found.token_ids for found in output.outputs] for output in llm.generate(list(prompts), search)]


def by_resubmission(llm: LLM, prompts: Prompts, search: SamplingParams) -> Outputs:
    """Search with one request for each beam and token."""
    assert search.max_tokens is not None
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=search.num_candidates, ignore_eos=True)
    searches = [BeamSearch(search, frozenset(), search.max_tokens) for _ in prompts]
    beams = {at: [prompt] for at, prompt in enumerate(prompts)}
    while beams:
        outputs = iter(llm.generate([beam for of in beams.values() for beam in of], one))
        for at, of in list(beams.items()):
            candidates: list[list[tuple[int, float]]] = []
            for _ in of:
                (entries,) = next(outputs).outputs[0].logprobs or [{}]
                ranked = sorted(entries.items(), key=lambda entry: entry[1].rank)
                candidates.append([(token, entry.logprob) for token, entry in ranked])
            choice = searches[at].step(candidates)
            if choice is None:
                del beams[at]
            else:
                beams[at] = [[*of[p], token] for p, token in zip(choice.parents, choice.tokens, strict=True)]
    return [[found.tokens for found in each.ended] for each in searches]


def _config(args: argparse.Namespace, options: EngineOptions) -> EngineConfig:
    if args.shape is not None:
        return make_engine_config(options, model=find_shape(args.shape))
    return make_engine_config(options, folder=find_model(options.model))


def print_report(
    args: argparse.Namespace, config: EngineConfig, seconds: dict[str, list[float]], others: list[float], num_equal: int
) -> None:
    """``num_equal``: rounds, with the warm-up, in which both searches found the same outputs."""
    num_tokens = args.num_prompts * args.beam_width * args.output_len
    results: dict[str, Any] = {
        name: {"seconds": each, "tokens_per_s": num_tokens / statistics.median(each)} for name, each in seconds.items()
    }
    pairs = [slow / fast for fast, slow in zip(seconds["engine"], seconds["resubmission"], strict=True)]
    results |= {"speedup": statistics.median(pairs), "speedup_rounds": pairs, "num_equal_rounds": num_equal}
    results["others_cores"] = others
    flags = ("beam_width", "num_prompts", "input_len", "output_len", "rounds")
    settings = {"model": args.shape or "checkpoint", "dtype": config.dtype} | {n: getattr(args, n) for n in flags}
    report = RunReport("beams", settings, rounded(results, 3))
    title = f"{settings['model']}, {args.num_prompts} prompts of {args.input_len} tokens, width {args.beam_width}"
    rows = [(name, [results[name]["tokens_per_s"]]) for name in seconds]
    report.tables.append(Table(title, ["tokens of all beams/s"], rows))
    report.notes.append(f"speedup {results['speedup']:.2f}; equal outputs in {num_equal} of {1 + args.rounds} rounds")
    report.publish(args.json)
