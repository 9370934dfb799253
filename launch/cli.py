"""The ``quire`` command: a table of commands. What one of them needs is imported only when that one is asked for."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from quire.launch.config.command_line import add_config_file, add_options, read_options
from quire.launch.config.options import EngineOptions, suggest
from quire.launch.config.serve_options import ServeOptions
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
    args = parse(list(sys.argv[1:] if argv is None else argv))
    try:
        args.run(args)
    except (QuireError, InvalidRequest) as error:
        print(f"quire: error: {error}", file=sys.stderr, flush=True)
        sys.exit(getattr(error, "exit_status", 1))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The chosen command's flags, and ``run``; exits with status 2 where the words are wrong."""
    parser, chosen = _make_parser(_chosen(words))
    args, unknown = parser.parse_known_args(words)
    if unknown:
        chosen.refuse_unknown(unknown)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        sys.exit(EX_USAGE)
    return args


class Command(NamedTuple):
    """One command: its line of help, what adds its flags to a parser, and what runs it."""

    text: str
    add_flags: Callable[[_Parser], None]
    run: Callable[[argparse.Namespace], None]


def _chosen(words: Sequence[str]) -> str:
    """The command that the words ask for, as a key of ``COMMANDS``; else another word, or nothing."""
    names = [word for word in words if not word.startswith("-")]
    return " ".join(names[: 2 if names[:1] == [BENCH] else 1])


def _make_parser(chosen: str) -> tuple[_Parser, _Parser]:
    """The whole parser, and that of the chosen command, which alone has its flags."""
    parser = _Parser(prog="quire", description="Quire, a serving engine for large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")}
    found = parser
    for name, command in COMMANDS.items():
        above, _, word = name.rpartition(" ")
        made = groups[above].add_parser(word, help=command.text, description=command.text, allow_abbrev=False)
        made.set_defaults(run=command.run)
        if name == BENCH:
            groups[name] = made.add_subparsers(title="benchmarks", metavar="BENCHMARK", dest="benchmark", required=True)
        if name == chosen:
            command.add_flags(made)
            found = made
    return parser, found


def _later(place: str) -> Callable[..., None]:
    """The function ``module:name`` of ``quire.launch``, imported when it is called."""
    module, _, name = place.partition(":")
    return lambda *arguments: getattr(import_module(f"quire.launch.{module}"), name)(*arguments)


def _with_options(place: str) -> Callable[[argparse.Namespace], None]:
    """The same for a function that takes the engine's options, too."""
    return lambda args: _later(place)(args, read_options(args)[0])


def _add_serve_flags(parser: _Parser) -> None:
    add_options(parser, ServeOptions)
    _add_engine_options(parser)


def _add_generate_flags(parser: _Parser) -> None:
    parser.add_argument("--prompt", required=True, help="the text to complete")
    _add_sampling_options(parser)
    _add_engine_options(parser)


def _add_chat_flags(parser: _Parser) -> None:
    parser.add_argument("--prompt", help="the message to answer")
    _add_sampling_options(parser)
    _add_engine_options(parser)


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


def _as_flag(near: str) -> str:
    """A suggestion of a field's name, spelt as a flag."""
    head, sep, name = near.partition("did you mean ")
    if not sep or name.startswith(("-", "(", "M")):
        return near
    return f"{head}{sep}--{name.replace('_', '-')}"


BENCH = "bench"
COMMANDS = {
    "serve": Command("Serve a model over an OpenAI-compatible HTTP interface.", _add_serve_flags, _serve),
    "generate": Command(
        "Complete raw text in the terminal.", _add_generate_flags, _with_options("offline.terminal:generate")
    ),
    "chat": Command(
        "Answer a message through the model's chat template; without --prompt, one per line of input.",
        _add_chat_flags,
        _with_options("offline.terminal:chat"),
    ),
    "replay": Command(
        "Replay a trace: exactly as recorded, by other settings, or against a running server.",
        _later("replay.arguments:add_replay_flags"),
        _later("replay.command:run"),
    ),
    BENCH: Command(
        "Measure: engine, serve, wire, scheduler, sampling, kernels.", lambda parser: None, lambda args: None
    ),
    "bench engine": Command(
        "Tokens per second of the whole engine, offline.",
        _later("bench.flags:engine"),
        _with_options("bench.engine:run"),
    ),
    "bench serve": Command(
        "Drive a running server with a dataset's prompts.", _later("bench.flags:serve"), _later("bench.serve:run")
    ),
    "bench wire": Command(
        "Sizes and costs of the messages of a decoding batch.", _later("bench.flags:wire"), _later("bench.wire:run")
    ),
    "bench scheduler": Command(
        "What the scheduler costs per step, beside a peer's.",
        _later("bench.flags:scheduler"),
        _later("bench.scheduler.command:run"),
    ),
    "bench sampling": Command(
        "What processors, drafts and grammars cost and bring.",
        _later("bench.flags:sampling"),
        _later("bench.sampling:run"),
    ),
    "bench kernels": Command(
        "Kernels and steps, as shares of what the device can do.",
        _later("bench.flags:kernels"),
        _later("bench.kernels:run"),
    ),
}


if __name__ == "__main__":
    main()
