"""``--help`` of commands with many flags: a list of sections, and the flags of a section or with a word."""

import argparse
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.declared import declared
from quire.launch.config.foreign_names import suggest
from quire.launch.config.options import EngineOptions

MANY = 40
"""Flags of a command from which ``--help`` alone lists sections."""
Group = tuple[str, list[argparse.Action]]


class Help(argparse.Action):
    """Prints what is asked for and exits. ``--help=all`` is everything, ``--help=page`` the same in a pager."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        text = "show this help; WORD: all, a section, a flag, or a word that flags or their texts have"
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", metavar="WORD", help=text)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, word: Any, option: str | None = None
    ) -> None:
        groups = [(group.title or "", group._group_actions) for group in parser._action_groups]
        if not word:
            is_long = sum(len(actions) for _, actions in groups) >= MANY
            text = _sections(parser, groups) if is_long and _keys(groups) else parser.format_help()
        elif word in ("all", "page"):
            text = _format(parser, groups, usage=True)
        else:
            text = _found(parser, groups, word)
        if word == "page":
            from pydoc import pager

            pager(text)
        else:
            print(text, end="")
        parser.exit()


def _sections(parser: argparse.ArgumentParser, groups: Sequence[Group]) -> str:
    """Return the help without the flags of the sections, which are groups of declared settings."""
    keys, actions_of, prog = _keys(groups), dict(groups), parser.prog
    own = [(title, actions) for title, actions in groups if title not in keys.values()]
    width = max(map(len, keys))
    lines = [
        "sections:",
        *(f"  {key:<{width}}  {title} ({len(actions_of[title])} flags)" for key, title in keys.items()),
        "",
        f"{prog} --help=SECTION  shows the flags of a section",
        f"{prog} --help=--FLAG   all about one flag",
        f"{prog} --help=WORD     flags whose name or text has the word",
        f"{prog} --help=all      everything (=page: in a pager)",
    ]
    return _format(parser, own, usage=True) + "\n" + "\n".join(lines) + "\n"


def _keys(groups: Sequence[Group]) -> dict[str, str]:
    """Return the titles of sections by their short names."""
    topics = {each.setting.topic for options in (ServeOptions, EngineOptions) for each in declared(options)}
    return {title.split()[0].lower(): title for title, _ in groups if title in topics}


def _format(parser: argparse.ArgumentParser, groups: Sequence[Group], *, usage: bool = False) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    if usage:
        places = [action for action in parser._actions if not action.option_strings]
        names = [f"[{each.metavar}]" if each.nargs == "?" else str(each.metavar or each.dest) for each in places]
        formatter.add_usage(" ".join(["%(prog)s [flags]", *names]), [], [])
        formatter.add_text(parser.description)
    for title, actions in groups:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _found(parser: argparse.ArgumentParser, groups: Sequence[Group], word: str) -> str:
    """Return the section that begins with the word, else the flag, else a similar section, else flags with the word."""
    keys = _keys(groups)
    wanted = word.lower()
    name = _plain(wanted)
    sections = [key for key in keys if key.startswith(wanted)]
    flags = [action for action in parser._actions if name in map(_plain, action.option_strings)]
    if flags and not sections:
        return _details(parser, flags[0])
    sections += get_close_matches(wanted, keys, n=1, cutoff=0.7)
    if sections:
        return _format(parser, [group for group in groups if group[0] == keys[sections[0]]])
    kept = [(title, [action for action in actions if _has(action, wanted)]) for title, actions in groups]
    if not any(actions for _, actions in kept):
        names = ", ".join(keys) or "none"
        near = suggest(name.replace("-", "_"), ())
        parser.error(f"--help: no section, flag or text has {word[:64]!r}{near}; sections: {names}")
    return _format(parser, [(title, actions) for title, actions in kept if actions])


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _has(action: argparse.Action, word: str) -> bool:
    names = " ".join([*action.option_strings, str(action.metavar or action.dest)]).lower()
    return word in names or _plain(word) in names or word in (action.help or "").lower()


def _details(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return all that is known about one flag."""
    every = [each for options in (ServeOptions, EngineOptions) for each in declared(options)]
    each = next((each for each in every if each.flag == action.option_strings[0]), None)
    if each is None:
        return _format(parser, [("flag", [action])])
    metavar = "" if each.kind is bool else f" {action.metavar or 'VALUE'}"
    rows = {"default": each.default_text, "values": each.allowed, "in a file": each.name, "section": each.setting.topic}
    if each.setting.range is not None:
        rows["values"] += ", from {} to {}".format(*each.setting.range)
    text = textwrap.fill(each.setting.plain, 80, initial_indent="  ", subsequent_indent="  ")
    head = f"{', '.join(action.option_strings)}{metavar}\n\n{text}\n\n"
    return head + "".join(f"  {name + ':':<11}{value}\n" for name, value in rows.items())
