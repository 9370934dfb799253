"""Settings on the command line: one flag per declared setting, merged with a config file."""

import argparse
import contextlib
import sys
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args, get_origin

import msgspec

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.declared import Declared, convert, declared
from quire.launch.config.foreign_names import suggest
from quire.launch.config.options import EngineOptions, parse_options
from quire.launch.config.sizes import parse_size
from quire.protocol.errors import ConfigError


def add_engine_options(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE.yaml", help="file to read flags from; the command line overrides it"
    )
    add_options(parser, EngineOptions, only)


def add_url_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="use the running server at this address instead of an own engine")
    parser.add_argument(
        "--api-key", dest="server_key", metavar="KEY", help="API key of that server (the variable QUIRE_API_KEY)"
    )


def add_options(
    parser: argparse.ArgumentParser, options: type[msgspec.Struct], only: Collection[str] | None = None
) -> None:
    """Add a flag for each declared setting, in one group per topic. Flags and groups of the parser are kept.

    ``only``: names of the settings that get one; None: all.
    """
    taken = {flag for action in parser._actions for flag in action.option_strings}
    groups = {group.title: group for group in parser._action_groups}
    for each in declared(options):
        topic = each.setting.topic
        if each.flag in taken or (only is not None and each.name not in only):
            continue
        if topic not in groups:
            groups[topic] = parser.add_argument_group(topic)
        text = f"{each.setting.help} ({each.default_text})".replace("%", "%%")
        if each.name == "model":
            groups[topic].add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)
        else:
            groups[topic].add_argument(each.flag, default=argparse.SUPPRESS, help=text, **_argument(each))


def _argument(each: Declared) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting's type."""
    kind, metavar = each.kind, each.metavar
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is list:
        return {"nargs": "+", "action": "extend", "metavar": metavar}
    if get_origin(kind) is dict:
        return {"type": str, "metavar": "JSON"}  # parse_options decodes it
    if each.setting.unit:
        return {"type": partial(_size, each.setting.unit), "metavar": metavar}
    return {"type": kind, "metavar": metavar or "N"}


def _size(unit: str, text: str) -> int:
    try:
        return parse_size(text, unit)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_options(args: argparse.Namespace) -> tuple[EngineOptions, ServeOptions]:
    """Return the settings of the config file, overridden by those of the command line.

    Raises:
        ConfigError: the file cannot be read, or a key or a value is not allowed.
    """
    engine_keys, serve_keys = EngineOptions.__struct_fields__, ServeOptions.__struct_fields__
    keys = (*engine_keys, *serve_keys)
    given: dict[str, Any] = {}
    where = "command line"
    if args.config is not None:
        from quire.launch.config.config_file import read_config_file  # YAML is imported only for such a file

        where = str(args.config)
        spelled: dict[str, str] = {}
        for key, value in read_config_file(args.config).items():
            name = str(key).replace("-", "_")
            if name not in keys:
                raise ConfigError(f"{where}: unknown key {name!r}{suggest(name, keys)}")
            if name in given:
                raise ConfigError(f"{where}: {spelled[name]} and {key} are the same setting: give it once")
            given[name], spelled[name] = value, key
    given |= {key: value for key, value in vars(args).items() if key in keys}
    engine = parse_options({key: value for key, value in given.items() if key in engine_keys}, where)
    serve = convert({key: value for key, value in given.items() if key in serve_keys}, ServeOptions, where)
    return engine, serve


def check_no_settings(*options: msgspec.Struct, allowed: Collection[str] = ()) -> None:
    """Raise ConfigError for a setting of an engine, which the server at --url has already."""
    for each in options:
        for name, value in msgspec.structs.asdict(each).items():
            if name not in allowed and value != getattr(type(each)(), name):
                flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                raise ConfigError(f"--url cannot be combined with {flag}: the server has settings of its own")


@contextlib.contextmanager
def opened(flag: str, name: str, mode: str) -> Iterator[BinaryIO]:
    """Open a file of bytes; - is standard input or output."""
    if name == "-":
        yield sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open(mode))
        except OSError as error:
            raise ConfigError(f"{flag} {name} cannot be used: {error.strerror}") from None
        yield cast(BinaryIO, file)
