"""The ``quire`` command. Parsing lives here; what a command does is imported only when it runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.launch.config.command_line import add_config_file, add_options, read_options
from quire.launch.config.options import EngineOptions, suggest
from quire.launch.config.serve_options import ServeOptions
from quire.launch.replay.arguments import add_replay_flags
from quire.launch.supervision.descriptors import raise_descriptor_limit
from quire.protocol.errors import InvalidRequest, QuireError
from quire.protocol.process.log_stream import survive_without_stderr
from quire.version import __version__

EX_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(EX_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        word = unknown[0]
        if word.startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            name = word.split("=")[0]
            near = suggest(name.lstrip("-").replace("-", "_"), [f.lstrip("-").replace("-", "_") for f in flags])
            self.error(f"unknown flag {name}{_as_flag(near)}")
        self.error(f"unexpected argument {word!r}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; every expected failure ends in one line on stderr and a status other than 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _make_parser()
    args, unknown = parser.parse_known_args(words)
    if unknown:
        commands[_path(args)].refuse_unknown(unknown)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        sys.exit(EX_USAGE)
    try:
        args.run(args)
    except (QuireError, InvalidRequest) as error:
        print(f"quire: error: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_status", 1))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


def _make_parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="quire", description="Quire, a serving engine for large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands: dict[str, _Parser] = {}
    sub = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def command(under: Any, name: str, text: str, run: Any) -> _Parser:
        made: _Parser = under.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        commands[made.prog.removeprefix("quire ")] = made
        return made

    serve = command(sub, "serve", "Serve a model over an OpenAI-compatible HTTP interface.", _serve)
    add_options(serve, ServeOptions)
    _add_engine_options(serve)
    for name, text in (
        ("generate", "Complete raw text in the terminal."),
        ("chat", "Answer a message through the model's chat template; without --prompt, one per line of input."),
    ):
        one = command(sub, name, text, _generate if name == "generate" else _chat)
        one.add_argument("--prompt", required=name == "generate", help="what to complete or to answer")
        _add_sampling_options(one)
        _add_engine_options(one)
    replay = "Replay a trace: exactly as recorded, by other settings, or against a running server."
    add_replay_flags(command(sub, "replay", replay, _replay))
    text = "Measure: engine, serve, wire, scheduler, sampling, kernels."
    bench = sub.add_parser("bench", help=text, description="Measure the engine.")
    commands["bench"] = bench
    _add_bench(bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True), command)
    return parser, commands


def _add_bench(under: Any, command: Any) -> None:
    engine = command(under, "engine", "Tokens per second of the whole engine, offline.", _bench_engine)
    engine.add_argument("--shape", help="random weights of a named shape, such as smollm2-135m")
    engine.add_argument("--num-requests", type=int, default=32, help="requests at once (32)")
    engine.add_argument("--input-len", type=int, default=128, help="tokens of each prompt (128)")
    engine.add_argument("--output-len", type=int, default=128, help="tokens of each answer (128)")
    engine.add_argument("--rounds", type=int, default=3, help="timed rounds; the median counts (3)")
    engine.add_argument("--prompt-seed", type=int, default=0, help="of the prompts (0)")
    engine.add_argument("--threads", type=int, help="for ours and for peers (OMP_NUM_THREADS, else one per core)")
    peers = ("transformers-static", "transformers-continuous", "vllm")
    engine.add_argument("--peer", action="append", choices=peers, help="measure it in turns with ours; may be repeated")
    engine.add_argument("--peer-python", default=sys.executable, metavar="FILE", help="interpreter that has the peer")
    dtypes = ("auto", "bfloat16", "float32")
    engine.add_argument("--peer-dtype", choices=dtypes, default="auto", help="auto: the faster on this CPU (auto)")
    engine.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")
    _add_engine_options(engine)
    serve = command(under, "serve", "Drive a running server with a dataset's prompts.", _bench_serve)
    serve.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (http://127.0.0.1:8000)")
    serve.add_argument("--dataset", type=Path, required=True, help="JSON lines with a field input, .xz or .gz or plain")
    serve.add_argument("--num-prompts", type=int, help="only the first so many")
    serve.add_argument("--concurrency", type=int, default=8, help="closed loop: answers in flight at once (8)")
    serve.add_argument("--rate", type=float, help="open loop: requests per second, Poisson; instead of --concurrency")
    serve.add_argument("--max-tokens", type=int, default=64, help="of each answer (64)")
    serve.add_argument("--temperature", type=float, default=0.0, help="(0)")
    serve.add_argument("--seed", type=int, default=0, help="of arrivals, and of the requests (0)")
    serve.add_argument("--chat", action="store_true", help="as chat messages rather than raw completions")
    serve.add_argument("--ignore-eos", action="store_true", help="make each answer --max-tokens long")
    serve.add_argument("--model", help="name to ask for (the first that the server lists)")
    serve.add_argument("--api-key", help="of the server; else the variable QUIRE_API_KEY")
    serve.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")
    wire = command(under, "wire", "Sizes and costs of the messages of a decoding batch.", _bench_wire)
    wire.add_argument("--num-requests", type=int, default=256, help="requests that decode (256)")
    wire.add_argument("--steps", type=int, default=1024, help="steps to record (1024)")
    wire.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")
    scheduler = command(under, "scheduler", "What the scheduler costs per step, beside a peer's.", _bench_scheduler)
    scheduler.add_argument("--sections", metavar="A,B", help="only these (all)")
    scheduler.add_argument("--peer", type=Path, metavar="FILE", help="interpreter that has vLLM, measured in turns")
    scheduler.add_argument("--peer-driver", type=Path, metavar="FILE", help="the file that drives its scheduler")
    scheduler.add_argument("--repeats", type=int, default=1, help="fresh processes per section; medians count (1)")
    cruise = argparse.BooleanOptionalAction
    scheduler.add_argument("--cruise", action=cruise, default=True, help="the short way of steady steps (on)")
    scheduler.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")
    _add_bench_sampling(under, command)
    kernels = command(under, "kernels", "Kernels and steps, as shares of what the device can do.", _bench_kernels)
    kernels.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="whose kernels (auto)")
    kernels.add_argument("--sections", metavar="A,B", help="only these (all of the device's)")
    kernels.add_argument("--quick", action="store_true", help="fewer shapes, less time on each")
    kernels.add_argument("--dry-run", action="store_true", help="tiny sizes on a CPU: only whether it all runs")
    kernels.add_argument("--time-limit", type=float, metavar="S", help="begin nothing new after so many seconds")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")


def _add_bench_sampling(under: Any, command: Any) -> None:
    sampling = command(under, "sampling", "What processors, drafts and grammars cost and bring.", _bench_sampling)
    sampling.add_argument("--model", metavar="MODEL", help="whose tokenizer the masks are for (the demo's)")
    sampling.add_argument("--sections", metavar="A,B", help="only these (all): worker, masks, fall, repeating")
    sampling.add_argument("--rows", type=int, default=256, help="of the worker's batch (256)")
    sampling.add_argument("--vocab-size", type=int, default=32768, help="of the worker's logits (32768)")
    sampling.add_argument("--repeats", type=int, default=20, help="steps per figure; the median counts (20)")
    shape_help = "random weights of a named shape, to repeat a text beside the demo; may be repeated"
    sampling.add_argument("--shape", action="append", default=[], help=shape_help)
    sampling.add_argument("--method", choices=("ngram", "suffix"), default="ngram", help="who drafts (ngram)")
    sampling.add_argument("--output-len", type=int, default=512, help="tokens of the repeating answer (512)")
    sampling.add_argument("--rounds", type=int, default=5, help="answers by turns; the median counts (5)")
    sampling.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON here")


def _add_engine_options(parser: _Parser) -> None:
    add_config_file(parser)
    add_options(parser, EngineOptions)


def _add_sampling_options(parser: _Parser) -> None:
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate (up to the context)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus (1)")
    parser.add_argument("--top-k", type=int, default=0, help="0: all (0)")
    parser.add_argument("--sampling-seed", "--seed", dest="sampling_seed", type=int, help="same seed, same text")
    parser.add_argument("--stop", action="append", default=[], help="string that ends the answer; may be repeated")
    parser.add_argument("--json-schema", type=Path, metavar="FILE", help="the answer is JSON by this schema")
    parser.add_argument("--regex", help="the answer is text that this regular expression matches")
    parser.add_argument("--thinking-token-budget", type=int, metavar="N", help="most tokens of thinking (no limit)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def _serve(args: argparse.Namespace) -> None:
    survive_without_stderr()
    raise_descriptor_limit()
    from quire.launch.config.engine_config import make_engine_config
    from quire.launch.config.model_folder import find_model
    from quire.launch.serve import model_display_name, serve

    engine, front_end = read_options(args)
    folder = find_model(engine.model)
    name = model_display_name(folder, engine.model)
    if front_end.simulate is not None:
        from quire.launch.replay.simulate.simulated_engine import simulated_engine

        config, worker = simulated_engine(engine, front_end.simulate, folder)
        serve(config, front_end, name, worker)
        return
    serve(make_engine_config(engine, folder=folder), front_end, name)


def _generate(args: argparse.Namespace) -> None:
    from quire.launch.offline.terminal import generate

    generate(args, read_options(args)[0])


def _chat(args: argparse.Namespace) -> None:
    from quire.launch.offline.terminal import chat

    chat(args, read_options(args)[0])


def _replay(args: argparse.Namespace) -> None:
    from quire.launch.replay.command import run

    run(args)


def _bench_engine(args: argparse.Namespace) -> None:
    from quire.launch.bench.engine import run

    run(args, read_options(args)[0])


def _bench_serve(args: argparse.Namespace) -> None:
    from quire.launch.bench.serve import run

    run(args)


def _bench_wire(args: argparse.Namespace) -> None:
    from quire.launch.bench.wire import run

    run(args)


def _bench_scheduler(args: argparse.Namespace) -> None:
    from quire.launch.bench.scheduler.command import run

    run(args)


def _bench_sampling(args: argparse.Namespace) -> None:
    from quire.launch.bench.sampling import run

    run(args)


def _bench_kernels(args: argparse.Namespace) -> None:
    from quire.launch.bench.kernels import run

    run(args)


def _path(args: argparse.Namespace) -> str:
    benchmark = getattr(args, "benchmark", None)
    return f"{args.command} {benchmark}" if benchmark else str(args.command)


def _as_flag(near: str) -> str:
    """A suggestion of a field's name, spelt as a flag."""
    head, sep, name = near.partition("did you mean ")
    if not sep or name.startswith(("-", "(", "M")):
        return near
    return f"{head}{sep}--{name.replace('_', '-')}"


if __name__ == "__main__":
    main()
