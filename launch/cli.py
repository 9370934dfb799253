"""The ``quire`` command: a table of subcommands. The modules of a subcommand are imported only when it is chosen."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.api_keys import hide_in_command_line
from quire.launch.config.command_line import add_engine_options, add_options, add_url_options, read_options
from quire.launch.config.foreign_names import suggest
from quire.launch.help import Help
from quire.protocol.errors import InvalidRequest, QuireError, did_you_mean, shortage
from quire.protocol.process.descriptors import raise_descriptor_limit
from quire.protocol.process.log import one_line, start_logging, write_line
from quire.protocol.process.log_stream import survive_without_stderr
from quire.version import version_text

EX_USAGE = 2
OTHER_COMMANDS = {
    **dict.fromkeys(("run", "launch", "start"), "; did you mean chat (in the terminal) or serve?"),
    **dict.fromkeys(("pull", "download", "list"), "; a model is downloaded at its first use: quire serve ORG/NAME"),
    "ps": "; did you mean top?",
    "complete": "; did you mean generate?",
}
"""Commands of other servers, and what does the same here."""


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(EX_USAGE, one_line(f"{self.prog}: error: {message} (see {self.prog} --help)") + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            hint = OTHER_COMMANDS.get(value, "") if action.dest == "command" else ""
            hint = hint or did_you_mean(str(value), map(str, action.choices or ()))
            if not hint:
                raise
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}") from None

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        word = unknown[0]
        if word.startswith("-"):
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            name = word.split("=")[0]
            near = suggest(name.lstrip("-").replace("-", "_"), [f.lstrip("-").replace("-", "_") for f in flags])
            self.error(f"unknown flag {name}{_as_flag(near)}")
        self.error(f"unexpected argument {word!r}")


class _Version(argparse.Action):
    """Prints the versions, which are looked up only when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version_text())
        parser.exit()


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. An expected failure prints one line to stderr and exits with a non-zero status."""
    args = parse(list(sys.argv[1:] if argv is None else argv))
    for name in ("api_key", "admin_api_key"):
        keys = getattr(args, name, None) or []
        hide_in_command_line([keys] if isinstance(keys, str) else keys)
    try:
        args.run(args)
    except (QuireError, InvalidRequest) as error:
        write_line(f"quire: error: {error}", logging.ERROR)
        sys.exit(getattr(error, "exit_status", 1))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except (OSError, MemoryError, RuntimeError, UnicodeEncodeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        write_line(f"quire: error: {reason}", logging.ERROR)
        sys.exit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the chosen command's flags and its ``run``; exit with status 2 if the arguments are invalid."""
    parser, chosen = _make_parser(_chosen(arguments))
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen.refuse_unknown(unknown)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        sys.exit(EX_USAGE)
    return args


class Subcommand(NamedTuple):
    """One command: its help line, the function that adds its flags to a parser, and the function that runs it."""

    text: str
    add_flags: Callable[[_Parser], None]
    run: Callable[[argparse.Namespace], None]


def _chosen(arguments: Sequence[str]) -> str:
    """Return the command that the arguments name, a key of ``COMMANDS`` if they are valid; "" if they name none."""
    names = [word for word in arguments if not word.startswith("-")]
    return " ".join(names[: 2 if names[:1] == [BENCH] else 1])


def _make_parser(chosen: str | None) -> tuple[_Parser, _Parser]:
    """Return the whole parser and the chosen command's parser. Only the chosen command gets its flags; None: all do."""
    parser = _Parser(prog="quire", description="Quire, a serving engine for large language models.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of quire, its commit and torch")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")}
    found = parser
    for name, command in COMMANDS.items():
        above, _, word = name.rpartition(" ")
        more: dict[str, Any] = {"help": command.text, "description": command.text, "add_help": False}
        made = groups[above].add_parser(word, allow_abbrev=False, **more)
        made.add_argument("-h", "--help", action=Help)
        made.set_defaults(run=command.run)
        if name == BENCH:
            groups[name] = made.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True)
        if chosen in (name, None):
            command.add_flags(made)
            found = made
    return parser, found


def _lazy(target: str) -> Callable[..., None]:
    """Return a function that imports ``module:name`` of ``quire`` when it is called, and calls it."""
    module, _, name = target.partition(":")
    return lambda *arguments: getattr(import_module(f"quire.{module}"), name)(*arguments)


def _with_options(target: str) -> Callable[[argparse.Namespace], None]:
    """Return the same for a function that runs an engine, and also takes its options."""

    def run(args: argparse.Namespace) -> None:
        start_logging()
        _lazy(target)(args, read_options(args)[0])

    return run


def _add_serve_flags(parser: _Parser) -> None:
    add_options(parser, ServeOptions)
    add_engine_options(parser)


def _add_generate_flags(parser: _Parser) -> None:
    parser.add_argument("--prompt", required=True, help="text to complete", metavar="TEXT")
    _add_answer_flags(parser)


def _add_chat_flags(parser: _Parser) -> None:
    parser.add_argument("--prompt", help="message to answer", metavar="TEXT")
    text = "image of the message, or of the first line; may be repeated"
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE", help=text)
    _add_answer_flags(parser)


def _add_answer_flags(parser: _Parser) -> None:
    add_url_options(parser)
    parser.add_argument("--lora", type=Path, metavar="DIR", help="LoRA adapter to answer with")
    _add_sampling_options(parser)
    add_engine_options(parser)


def _add_embed_flags(parser: _Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="one text per line; -: standard input")
    parser.add_argument("-m", "--model", dest="model", default=argparse.SUPPRESS, metavar="MODEL", help="as MODEL")
    add_url_options(parser)
    parser.add_argument("-o", "--output-file", default="-", metavar="FILE", help="results; -: standard output (-)")
    parser.add_argument(
        "--format", choices=("jsonl", "npy"), default="jsonl", help="one JSON object per line, or a NumPy array (jsonl)"
    )
    parser.add_argument("--dimensions", type=int, metavar="N", help="entries of a vector that are kept (all)")
    parser.add_argument(
        "--truncate-prompt-tokens",
        type=int,
        metavar="N",
        help="cut longer lines to this many tokens; -1: the longest that the model reads (they are refused)",
    )
    parser.add_argument("--prompt-name", metavar="NAME", help="the model's prompt to put before each line")
    add_engine_options(parser)


def _add_check_flags(parser: _Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    engine = ("model", "model_impl", "chat_template", "max_model_len", "reasoning_start_str", "reasoning_end_str")
    add_engine_options(parser, engine)
    add_options(parser, ServeOptions, ("tool_call_parser", "reasoning_parser"))


def _add_sampling_options(parser: _Parser) -> None:
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="maximum number of tokens to generate (up to the context length)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="sampling temperature; 0: greedy (0)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling: cumulative probability to keep (1)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="number of most likely tokens to sample from; 0: all (0)"
    )
    parser.add_argument(
        "--sampling-seed",
        "--seed",
        dest="sampling_seed",
        type=int,
        metavar="N",
        help="random seed for sampling; the same seed gives the same text (random)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="string that ends the answer; may be repeated"
    )
    parser.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON schema that the answer must satisfy")
    parser.add_argument("--regex", metavar="REGEX", help="regular expression that the answer must match")
    parser.add_argument(
        "--thinking-token-budget", type=int, metavar="N", help="maximum number of thinking tokens (no limit)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def _serve(args: argparse.Namespace) -> None:
    survive_without_stderr()
    raise_descriptor_limit()
    from quire.launch.config.adapter_options import with_adapters
    from quire.launch.config.engine_config import make_engine_config
    from quire.launch.config.model_folder import find_model
    from quire.launch.nodes.sources import warn_of_device
    from quire.launch.serve import check_options, model_display_name, serve

    engine, front_end = with_adapters(*read_options(args))
    check_options(front_end)
    start_logging(front_end.logs)
    folder = find_model(engine.model)
    name = model_display_name(folder, engine.model)
    if front_end.simulate is not None:
        simulated_engine = import_module("quire.replay.simulate.simulated_engine").simulated_engine
        config, worker = simulated_engine(engine, front_end.simulate, folder)
        serve(config, front_end, name, worker)
        return
    config = make_engine_config(engine, folder=folder)
    warn_of_device(engine.device, config, front_end)
    serve(config, front_end, name)


def _complete(args: argparse.Namespace) -> None:
    from quire.launch.completion import script

    print(script(args.shell, _make_parser(None)[0]), end="")


def _as_flag(near: str) -> str:
    """Return a suggestion that names a field with the field written as a flag."""
    head, sep, name = near.partition("did you mean ")
    if not sep or name.startswith(("-", "(", "M")):
        return near
    return f"{head}{sep}--{name.replace('_', '-')}"


BENCH = "bench"
BENCHMARKS = {
    "engine": "Measure the throughput of the whole engine, offline.",
    "embed": "Measure the texts per second of an encoder, optionally beside sentence-transformers.",
    "serve": "Measure a running server with a dataset's prompts.",
    "beams": "Measure beam search beside one that submits each token again.",
    "pins": "Compare the learned times for which blocks are kept while tools run with the best fixed one.",
    "wire": "Measure size and cost of the messages of a decoding batch.",
    "router": "Measure the router's time per request and per event, and the memory of its index.",
    "scheduler": "Measure the scheduler's time per step, optionally beside another engine's.",
    "sampling": "Measure the cost and benefit of logits processors, draft tokens and grammars.",
    "kernels": "Measure kernels and steps as fractions of the device's limits.",
}
"""Each is a module of ``quire.bench`` and has its flags in ``flags.py``."""
OFFLINE_BENCHMARKS = ("engine", "embed", "beams")
RUNNERS = {"scheduler": "scheduler.scheduler"}
COMMANDS = {
    "serve": Subcommand("Serve a model over an OpenAI-compatible HTTP interface.", _add_serve_flags, _serve),
    "generate": Subcommand(
        "Complete raw text in the terminal.", _add_generate_flags, _with_options("launch.offline.terminal:generate")
    ),
    "chat": Subcommand(
        "Answer a message through the model's chat template; without --prompt, each line of input.",
        _add_chat_flags,
        _with_options("launch.offline.terminal:chat"),
    ),
    "embed": Subcommand(
        "Write the vectors of the lines of a file, with an own engine or a running server.",
        _add_embed_flags,
        _with_options("launch.offline.embed_command:run"),
    ),
    "check": Subcommand(
        "Show what a checkpoint can do, and what its files lose of requests; exit with 1 if anything.",
        _add_check_flags,
        _lazy("launch.check:run"),
    ),
    "run-batch": Subcommand(
        "Answer a file of requests, with an own engine or a running server.",
        _lazy("launch.run_batch.run_batch:add_flags"),
        _lazy("launch.run_batch.run_batch:run"),
    ),
    "top": Subcommand(
        "Show what a running server does: requests, tokens per second, KV blocks, times.",
        _lazy("launch.top.watch:add_top_flags"),
        _lazy("launch.top.watch:run"),
    ),
    "engines": Subcommand(
        "List the engines of a running server; add, drain, resume, remove or restart them.",
        _lazy("launch.fleet.engine_orders:add_engines_flags"),
        _lazy("launch.fleet.engine_orders:run"),
    ),
    "replay": Subcommand(
        "Replay a trace: exactly as recorded, with other settings, or against a running server.",
        _lazy("replay.arguments:add_replay_flags"),
        _lazy("replay.replay:run"),
    ),
    "node": Subcommand(
        "Run the workers of other machines' servers on this machine's devices.",
        _lazy("launch.nodes.node:add_node_flags"),
        _lazy("launch.nodes.node:run"),
    ),
    "plan": Subcommand(
        "Find how many engines carry a trace within given latencies, by simulation.",
        _lazy("replay.arguments:add_plan_flags"),
        _lazy("replay.plan.plan:run"),
    ),
    "completion": Subcommand(
        "Print a script that lets a shell complete commands, flags and values.",
        _lazy("launch.completion:add_completion_flags"),
        _complete,
    ),
    BENCH: Subcommand(
        f"Run a benchmark: {', '.join(BENCHMARKS)}.",
        lambda parser: None,
        lambda args: None,
    ),
    **{
        f"{BENCH} {name}": Subcommand(
            text,
            _lazy(f"bench.flags:{name}"),
            (_with_options if name in OFFLINE_BENCHMARKS else _lazy)(f"bench.{RUNNERS.get(name, name)}:run"),
        )
        for name, text in BENCHMARKS.items()
    },
}


if __name__ == "__main__":
    main()
