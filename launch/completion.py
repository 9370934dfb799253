"""``quire completion``: scripts that let a shell complete commands, flags and values, made from the parser."""

import argparse
import shlex

SHELLS = ("bash", "zsh", "fish")
PATHS = ("FILE", "FOLDER", "DIR", "PATH", "MODEL", "TEMPLATE", "TRACE")
"""Words of the metavars of what may be a path."""
FISH_FILES = "(__fish_complete_path (string replace -r '^--[^=]*=' '' -- (commandline -ct)))"
"""shtab's own offers nothing for ``--flag=path``."""
# Bash gives --flag=value as three words; shtab reads two. Where there is no word to offer, bash completes file names.
BASH_END = """
_quire() {
    local at word words=()
    for ((at = 0; at <= COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        if [[ $word != = ]]; then words+=("$word"); elif ((at == COMP_CWORD)); then words+=(''); fi
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
    _shtab_quire
}
complete -o bashdefault -o default -F _quire quire"""


def add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script: source <(quire completion bash)")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of ``SHELLS``. ``parser``: the whole one, whose actions are changed."""
    import shtab

    _mark(parser, shell)
    text = shtab.complete(parser, shell)
    if shell == "zsh":  # shtab's script takes itself for an autoloaded file unless eval runs it
        text = f"eval {shlex.quote(text)}"
    return text + (BASH_END if shell == "bash" else "") + "\n"


def _mark(parser: argparse.ArgumentParser, shell: str) -> None:
    """Mark what takes a path, and for zsh the flags that may be joined with their values."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _mark(child, shell)
        elif action.nargs != 0 and not action.choices:
            metavar = action.metavar or action.dest
            if any(word in str(metavar) for word in PATHS):
                files = shtab.DIR if metavar == "DIR" else {**shtab.FILE, "fish": FISH_FILES}
                action.complete = files  # type: ignore[attr-defined]
        if shell == "zsh" and action.nargs != 0:
            action.option_strings = [name + "=" * name.startswith("--") for name in action.option_strings]
