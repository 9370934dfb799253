"""Sampling flags that need more than a range check: thinking markers, logits processors, the grammar library."""

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.descriptions import TOKENIZER, AddedTokens, has_tokenizer, read_description
from quire.protocol.model.gguf_file import is_gguf, read_gguf
from quire.protocol.model.gguf_tokenizer import added_tokens
from quire.version import install_command

DEFAULT_MARKERS = ("<think>", "</think>")
MAX_MARKER_TOKENS = 64


def thinking_markers(
    folder: Path | None, start: str | None, end: str | None, vocab_size: int
) -> tuple[list[int], list[int]]:
    """Return the token ids of the start and end markers of thinking; two empty lists without thinking.

    Args:
        start, end: texts of the markers. Both None: ``<think>`` and ``</think>`` if the tokenizer has both as single
            tokens. Both empty: no thinking.

    Raises:
        ConfigError: only one is given, there is no tokenizer, or a marker has no tokens, more than
            ``MAX_MARKER_TOKENS``, or a token that the model does not have.
    """
    is_text = folder is not None and has_tokenizer(folder)
    if start is None and end is None:
        return _default_markers(folder, vocab_size) if folder is not None and is_text else ([], [])
    if not start and not end:
        return [], []
    if not start or not end:
        raise ConfigError("--reasoning-start-str and --reasoning-end-str must be given together")
    if folder is None or not is_text:
        raise ConfigError("--reasoning-start-str needs a tokenizer, which this model does not have")
    from quire.frontend.text.text_in import TextIn

    text_in = TextIn.load(folder)
    markers = [text_in.encode(text, add_special_tokens=False) for text in (start, end)]
    flags = ("--reasoning-start-str", "--reasoning-end-str")
    for flag, text, ids in zip(flags, (start, end), markers, strict=True):
        if not 1 <= len(ids) <= MAX_MARKER_TOKENS or max(ids) >= vocab_size:
            given = f"{printable(text)}, which has {len(ids)}"
            raise ConfigError(f"{flag} must be 1 to {MAX_MARKER_TOKENS} of the model's tokens long (got {given})")
    return markers[0], markers[1]


def _default_markers(model: Path, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return the default markers; two empty lists for an unreadable file, which the tokenizer's loader reports."""
    try:
        ids = added_token_ids(model)
    except (ConfigError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return [], []
    start, end = (token_id if 0 <= (token_id := ids.get(text, -1)) < vocab_size else None for text in DEFAULT_MARKERS)
    return ([], []) if start is None or end is None else ([start], [end])


def added_token_ids(model: Path) -> dict[str, int]:
    """Return the ids of single tokens by text, without the rest of the tokenizer."""
    if is_gguf(model):
        return added_tokens(read_gguf(model))
    tokens = msgspec.json.decode(read_description(model, TOKENIZER) or "{}", type=AddedTokens).added_tokens
    return {token.content: token.id for token in tokens}


def check_grammar_library(name: str) -> None:
    """Raise ConfigError if the grammar library is not installed. The default one always is."""
    if name != "llguidance" and importlib.util.find_spec(name) is None:
        raise ConfigError(f"--structured-outputs-backend {name} needs the package {name}: {install_command(name)}")


def processor_name(given: object) -> str:
    """Return ``module:Class`` of a logits processor, which is given in that form or as a class.

    Raises:
        ConfigError: other processes cannot import the class by its name.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, type):
        raise ConfigError(f"logits_processors must hold classes or module:Class, not {given!r}")
    module, name = given.__module__, given.__qualname__
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"logits processor {name} must be importable by the engine's processes: put it at the top level of a "
            "module of its own"
        )
    return f"{module}:{name}"


def check_processor_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not ``module:Class`` or has no such module. Imports nothing."""
    for name in names:
        module, _, path = name.partition(":")
        package = module.partition(".")[0]
        if not package.isidentifier() or not path:
            raise ConfigError(f"--logits-processors must be module:Class, not {name!r}")
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--logits-processors {name}: module {package} not found; the current directory is searched only if "
                "PYTHONPATH contains it"
            )


def import_paths(names: Sequence[str]) -> list[str]:
    """Return the entries of ``sys.path`` that contain the modules of these ``module:Class`` names.

    Child processes need them, because they run without the current directory and without entries that this process
    added. Folders of installed packages are left out: children search them anyway, and placed earlier on the path they
    would hide the standard library.
    """
    installed = {Path(place).resolve() for place in sysconfig.get_paths().values()}
    entries = {Path(entry or ".").resolve() for entry in sys.path} - installed
    found = [
        place for name in names for place in _folders_of(name.partition(":")[0].partition(".")[0]) if place in entries
    ]
    return [str(place) for place in dict.fromkeys(found)]


def _folders_of(package: str) -> list[Path]:
    """Return the folders that contain a package or module; empty if it was not loaded from a file."""
    try:
        spec = importlib.util.find_spec(package) if package else None
    except ValueError:  # a module object created at run time has no spec
        spec = None
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place).resolve().parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).resolve().parent] if spec.has_location and spec.origin is not None else []
