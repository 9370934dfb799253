"""The flags of sampling that need more than a range: thinking markers, plugins' names, the grammar library."""

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.protocol.errors import ConfigError

DEFAULT_MARKERS = ("<think>", "</think>")
MAX_MARKER_TOKENS = 64


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that names single tokens; reading no more is quick."""

    added_tokens: list[_AddedToken] = []


def thinking_markers(
    folder: Path | None, start: str | None, end: str | None, vocab_size: int
) -> tuple[list[int], list[int]]:
    """Token ids of the markers around thinking; two empty lists where there are none.

    Args:
        start, end: their texts. Both None: ``<think>`` and ``</think>``, where the tokenizer has both as single
            tokens. Both empty: none.

    Raises:
        ConfigError: only one is given, there is no tokenizer, or a text is no token, too many, or beyond the model's.
    """
    path = None if folder is None else folder / "tokenizer.json"
    has_tokenizer = path is not None and path.is_file()
    if start is None and end is None:
        return _default_markers(path, vocab_size) if path is not None and has_tokenizer else ([], [])
    if not start and not end:
        return [], []
    if not start or not end:
        raise ConfigError("--reasoning-start-str and --reasoning-end-str must be given together")
    if folder is None or not has_tokenizer:
        raise ConfigError("--reasoning-start-str needs a tokenizer, which this model does not have")
    from quire.launch.text.text_in import TextIn

    text_in = TextIn.load(folder)
    markers = [text_in.encode(text, add_special_tokens=False) for text in (start, end)]
    for flag, ids in zip(("--reasoning-start-str", "--reasoning-end-str"), markers, strict=True):
        if not 1 <= len(ids) <= MAX_MARKER_TOKENS or max(ids) >= vocab_size:
            raise ConfigError(f"{flag} must be 1 to {MAX_MARKER_TOKENS} of the model's tokens long")
    return markers[0], markers[1]


def _default_markers(path: Path, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return the default markers; none for a file that cannot be read, which the tokenizer's loader refuses."""
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return [], []
    ids = {token.content: token.id for token in tokens if 0 <= token.id < vocab_size}
    start, end = (ids.get(text) for text in DEFAULT_MARKERS)
    return ([], []) if start is None or end is None else ([start], [end])


def check_grammar_library(name: str) -> None:
    """Raise ConfigError where the library that was asked for is not installed; the default one always is."""
    if name != "llguidance" and importlib.util.find_spec(name) is None:
        raise ConfigError(f"--structured-outputs-backend {name} needs the package {name}: pip install {name}")


def processor_name(given: object) -> str:
    """``module:Class`` of a logits processor, given so or as the class itself.

    Raises:
        ConfigError: other processes could not import the class by its name.
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
    """Raise ConfigError for a name that is not ``module:Class``, or whose module does not exist. Imports nothing."""
    for name in names:
        module, _, path = name.partition(":")
        package = module.partition(".")[0]
        if not package.isidentifier() or not path:
            raise ConfigError(f"--logits-processors must be module:Class, not {name!r}")
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"--logits-processors {name}: there is no module {package}; the current directory is searched only if "
                "the variable PYTHONPATH names it"
            )


def import_paths(names: Sequence[str]) -> list[str]:
    """The entries of this process's path that the modules of ``module:Class`` names come from.

    Children run without the current directory on their path, and see no entry that this process added by itself. Where
    packages are installed, they look anyway; and there it must stay the last place, or it would hide Python's own.
    """
    own = {Path(place).resolve() for place in sysconfig.get_paths().values()}
    entries = {Path(entry or ".").resolve() for entry in sys.path} - own
    found = [place for name in names for place in _homes(name.partition(":")[0].partition(".")[0]) if place in entries]
    return [str(place) for place in dict.fromkeys(found)]


def _homes(package: str) -> list[Path]:
    """The folders that a package or module lies in; none for one that is not in a file."""
    try:
        spec = importlib.util.find_spec(package) if package else None
    except ValueError:  # a module that was made by hand
        spec = None
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(place).resolve().parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).resolve().parent] if spec.has_location and spec.origin is not None else []
