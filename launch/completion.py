"""``quire completion``: scripts that let a shell complete commands, flags and values, made from the parsers."""

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")
Parsers = Mapping[str, argparse.ArgumentParser]
"""The parser of each command by the command's name, such as ``bench serve``."""


class _Flag(NamedTuple):
    """One flag. ``metavar``: "" for a flag without a value. ``choices``: its values, if they are known."""

    names: list[str]
    metavar: str
    choices: list[str]
    text: str

    @property
    def takes_path(self) -> bool:
        return "FILE" in self.metavar or "DIR" in self.metavar


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script: source <(quire completion bash)")


def script(shell: str, parsers: Parsers) -> str:
    """Return the script for one of ``SHELLS``."""
    lines = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](parsers)
    return "\n".join([*lines, ""])


def _flags(parser: argparse.ArgumentParser) -> list[_Flag]:
    found = []
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        takes_value = action.nargs not in (0, "?") and bool(action.option_strings)
        metavar = str(action.metavar or action.dest) if takes_value else ""
        if action.option_strings:
            text = " ".join(str(action.help or "").replace("%%", "%").split())
            found.append(_Flag([*action.option_strings], metavar, choices, text))
    return found


def _values(parser: argparse.ArgumentParser) -> list[str]:
    """Return the known values of a positional argument."""
    return [str(each) for action in parser._actions if not action.option_strings for each in action.choices or ()]


def _text(parser: argparse.ArgumentParser) -> str:
    return str(parser.description)


def _bash(parsers: Parsers) -> Iterator[str]:
    """Yield lines. Where they offer no word, bash completes file names."""
    yield from ("# bash completion of quire: source <(quire completion bash)", "_quire() {")
    yield "    local command=${COMP_WORDS[1]} words='' flags=''"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}"
    yield '    [[ $command == bench ]] && ((COMP_CWORD > 2)) && command="bench ${COMP_WORDS[2]}"'
    yield "    if [[ $word == = ]]; then word=''; elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi"
    yield f"    ((COMP_CWORD == 1)) && command='' && words='{' '.join(_children(parsers, ''))}'"
    yield '    case "$command $before" in'
    for name, parser in parsers.items():
        for flag in _flags(parser):
            if flag.choices:
                patterns = "|".join(f"'{name} {each}'" for each in flag.names)
                yield f"    {patterns}) words='{' '.join(flag.choices)}' ;;"
    yield from ("    *)", '        case "$command" in')
    for name, parser in parsers.items():
        flags = " ".join(each for flag in _flags(parser) for each in flag.names)
        yield f"        '{name}') flags='{flags}' words='{' '.join([*_children(parsers, name), *_values(parser)])}' ;;"
    yield from ("        esac", "        [[ $word == -* ]] && words=$flags ;;", "    esac")
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield from ("}", "complete -o bashdefault -o default -F _quire quire")


def _children(parsers: Parsers, name: str) -> list[str]:
    """Return the commands of the program (name "") or of a group of commands."""
    inner = f"{name} " if name else ""
    return [each.removeprefix(inner) for each in parsers if each.startswith(inner) and each.count(" ") == bool(name)]


def _zsh(parsers: Parsers) -> Iterator[str]:
    yield "# zsh completion of quire: source <(quire completion zsh)"
    for name, parser in parsers.items():
        yield f"_quire_{_identifier(name)}() {{"
        children = _children(parsers, name)
        if children:
            yield from _zsh_commands(parsers, name)
        else:
            yield "    _arguments \\"
            for flag in _flags(parser):
                yield from (f"        {spec} \\" for spec in _zsh_specs(flag))
            values = _values(parser)
            yield f"        '*:argument:({' '.join(values)})'" if values else "        '*:argument:_files'"
        yield "}"
    yield from ("_quire() {", *_zsh_commands(parsers, ""), "}")
    yield "compdef _quire quire"


def _zsh_commands(parsers: Parsers, name: str) -> Iterator[str]:
    """Yield lines that complete the commands of a group, and then what the chosen one takes."""
    children = _children(parsers, name)
    yield "    local line state"
    yield "    _arguments -C '1: :->command' '*:: :->argument'"
    yield "    case $state in"
    yield "    command) _values command \\"
    for child in children:
        text = _text(parsers[f"{name} {child}".strip()])
        yield f"        {_quoted(f'{child}[{_zsh_text(text)}]')} \\"
    yield "        ;;"
    yield "    argument) case $line[1] in"
    for child in children:
        yield f"        {child}) _quire_{_identifier(f'{name} {child}'.strip())} ;;"
    yield from ("        esac ;;", "    esac")


def _zsh_specs(flag: _Flag) -> Iterator[str]:
    for name in flag.names:
        mark = "=" if flag.metavar and name.startswith("--") else ""
        spec = f"{name}{mark}[{_zsh_text(flag.text)}]"
        if flag.metavar:
            values = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.takes_path else " "
            spec += f":{_zsh_text(flag.metavar)}:{values}"
        yield _quoted(spec)


def _zsh_text(text: str) -> str:
    return re.sub(r"([\\\[\]:])", r"\\\1", text)


def _fish(parsers: Parsers) -> Iterator[str]:
    yield "# fish completion of quire: quire completion fish | source"
    yield from ("function __quire_at", "    set -l words (commandline -opc)")
    yield from ("    set -l last (math 1 + (count $argv))", '    test "$words[2..$last]" = "$argv"', "end")
    yield from ("function __quire_alone", "    set -l words (commandline -opc)")
    yield from ("    test (count $words) -eq (math 1 + (count $argv)); and __quire_at $argv", "end")
    for child in _children(parsers, ""):
        text = _text(parsers[child])
        yield f"complete -c quire -n 'test (count (commandline -opc)) -eq 1' -f -a {child} -d {_quoted(text)}"
    for name, parser in parsers.items():
        for child in _children(parsers, name):
            text = _text(parsers[f"{name} {child}"])
            yield f"complete -c quire -n '__quire_alone {name}' -f -a {child} -d {_quoted(text)}"
        values = _values(parser)
        if values:
            yield f"complete -c quire -n '__quire_alone {name}' -f -a '{' '.join(values)}'"
        for flag in _flags(parser):
            names = " ".join(f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in flag.names)
            value = "-r -F" if flag.takes_path else "-x" if flag.metavar else "-f"
            if flag.choices:
                value += f" -a '{' '.join(flag.choices)}'"
            yield f"complete -c quire -n '__quire_at {name}' {names} {value} -d {_quoted(flag.text)}"


def _identifier(name: str) -> str:
    return name.replace(" ", "_")


def _quoted(text: str) -> str:
    """Return the text as one word of a shell. Shells escape an apostrophe in different ways, so it becomes a ’."""
    return "'" + text.replace("'", "’") + "'"
