"""Generates the tables of settings: ``python -P tools/flags_page.py docs/flags.md docs/sampling.md``."""

import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.declared import Declared, declared
from quire.launch.config.options import EngineOptions
from quire.launch.config.speculative import SpeculativeKeys

TABLES: dict[str, type[msgspec.Struct]] = {
    "engine": EngineOptions,
    "serve": ServeOptions,
    "speculative": SpeculativeKeys,
}
"""Name of a table in the page's markers → the struct that it describes."""


def with_tables(page: str) -> str:
    """Return the page with each table between ``<!-- NAME: ... -->`` and ``<!-- end -->`` regenerated."""
    for name, options in TABLES.items():
        pattern = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        body = _table(options)
        page = pattern.sub(lambda match, body=body: f"{match[1]}{body}{match[2]}", page)  # type: ignore[misc]
    return page


def _table(options: type[msgspec.Struct]) -> str:
    text, topic = "", ""
    are_keys = options is SpeculativeKeys
    first = "key" if are_keys else "flag"
    for each in declared(options):
        if each.setting.topic != topic:
            topic = each.setting.topic
            text += f"\n**{topic}**\n\n| {first} | default | values | meaning |\n|---|---|---|---|\n"
        name = f"`{each.name}`" if are_keys else _flag(each)
        text += f"| {name} | {_escaped(each.default_text)} | {_values(each)} | {_escaped(each.setting.text)} |\n"
    return text + "\n"


def _flag(each: Declared) -> str:
    if each.name == "model":
        return "`MODEL`"
    return f"`--[no-]{each.flag[2:]}`" if each.kind is bool else f"`{each.flag}`"


def _values(each: Declared) -> str:
    if get_origin(each.kind) is Literal:
        return " ".join(f"`{value}`" for value in get_args(each.kind))
    if each.setting.range is not None:
        low, high = each.setting.range
        return f"{low} to {high}"
    return each.metavar


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")


def main() -> None:
    for file in map(Path, sys.argv[1:]):
        file.write_text(with_tables(file.read_text()))


if __name__ == "__main__":
    main()
