"""Layouts of models of transformers: measured in a helper process, and kept for the next start.

Importing transformers takes seconds, so a kept layout saves most of what this costs. It belongs to the bytes of
``config.json``, to the version of transformers, and to the code that measures.
"""

import os
import re
from contextlib import closing, suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from math import isnan
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.measured_config import DivisionQuestion, MeasuredConfig, Refused
from quire.protocol.process.cache_folder import private_folder
from quire.protocol.process.helper import Helper, HelperDied
from quire.protocol.process.log import event_logger
from quire.version import install_command

log = event_logger("launch")

OLDEST = (5, 24)
"""Version of transformers that the measuring was written for. Older ones have no interface for attention in many
classes, and other names for masks."""

MODULE = "quire.worker_proc.models.transformers.measure"
RANKS_MODULE = "quire.worker_proc.models.transformers.ranks"
START_SECONDS = 300.0
MEASURE_SECONDS = 120.0
"""CPU seconds for one model. The largest that are known, of some hundred layers, take 10, and MAX_LAYERS take 30."""
NOTE_SECONDS = 10.0
"""Seconds until the log says that measuring takes long."""

MAX_LAYERS = 1024
MAX_NUMBER = 2**40
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layer|block)s?")
_NEEDED = re.compile(r"(num|n)_((hidden_)?layers?|((attention|key_value|kv)_)?heads?)|hidden_size|vocab_size|n_embd")
"""Numbers of which no model has none. Zeros of others, such as layers of a kind, are values."""
MAX_SETTINGS_BYTES = 2**20

NOT_KEPT = "the measured layout is not kept, so each start measures again"


def measured_layout(path: Path, raw: dict[str, Any]) -> MeasuredConfig:
    """Return the layout of the class of transformers that a ``config.json`` names, from an earlier start if possible.

    Args:
        raw: the decoded file.

    Raises:
        ConfigError: transformers is missing or too old, or cannot compute the model as Quire needs it.
    """
    installed = _installed(path, raw)
    _check_numbers(path, raw)
    settings = path.read_text(encoding="utf-8")
    if len(settings) > MAX_SETTINGS_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_SETTINGS_BYTES} characters, which no model needs: shorten it")
    kept = _kept_file(f"{_measuring_code()} {installed} {settings}")
    found = _read_kept(kept)
    if found is None:
        log.info("measuring the model's attention with transformers", version=installed)
        found = _measure(path, settings)
        _keep(kept, found)
    if isinstance(found, Refused):
        raise ConfigError(f"{path}: the model {found.reason}")
    return found


def divided_layout(flag: str, measured: MeasuredConfig, ranks: int) -> MeasuredConfig | Refused:
    """Return the layout with the heads of each of several ranks, from an earlier start if possible.

    Args:
        flag: the flag that asks for ranks, for messages.

    Raises:
        ConfigError: it cannot be found out whether ranks can share the model.
    """
    kept = _kept_file(f"{_measuring_code()} {measured.version} {ranks} {measured.settings}")
    found = _read_kept(kept)
    if found is None:
        log.info("trying the model's plan for tensor parallelism in transformers", ranks=ranks)
        found = _divide(flag, DivisionQuestion(measured, ranks))
        _keep(kept, found)
    return found


def _installed(path: Path, raw: dict[str, Any]) -> str:
    """Return the installed version of transformers, without importing it."""
    needs = f"{path}: architecture {printable(raw['architectures'][0])} needs transformers"
    install = install_command("transformers")
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise ConfigError(f"{needs}, which is not installed: {install}") from None
    numbers = [int(part) if part.isdecimal() else 0 for part in installed.split(".")[:2]]
    if tuple(numbers) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"{needs} {oldest} or newer, and {installed} is installed: {install}")
    return installed


def _check_numbers(path: Path, raw: dict[str, Any]) -> None:
    """Refuse what no model has before anything is built from it: the helper's limits are for what remains."""
    fields = list(raw.items())  # not by recursion, whose depth a file could choose
    for name, value in fields:
        shown = f"{path}: {printable(name)[1:-1]} must be"
        least, most = (0, MAX_LAYERS) if _LAYERS.fullmatch(name) else (-MAX_NUMBER, MAX_NUMBER)
        least = 1 if _NEEDED.fullmatch(name) else least
        if isinstance(value, dict):
            fields += value.items()
        elif isinstance(value, list):
            fields += [(name, each) for each in value]
        elif isinstance(value, int) and not least <= value <= most:
            raise ConfigError(f"{shown} from {least} to {most} (got {printable(value)})")
        elif isinstance(value, float) and isnan(value):
            raise ConfigError(f"{shown} a number (got NaN)")


def _measure(path: Path, settings: str) -> MeasuredConfig | Refused:
    return _ask(str(path), MODULE, settings.encode())


def _divide(flag: str, question: DivisionQuestion) -> MeasuredConfig | Refused:
    return _ask(flag, RANKS_MODULE, msgspec.msgpack.encode(question))


def _ask(place: str, module: str, question: bytes) -> MeasuredConfig | Refused:
    """Ask a helper process about a model. ``place``: a file or a flag, for messages."""
    note = Timer(NOTE_SECONDS, log.info, ["measuring takes long"], {"max_cpu_seconds": MEASURE_SECONDS})
    note.start()
    try:
        with closing(Helper(module, b"", START_SECONDS)) as helper:
            answer = helper.ask(question, MEASURE_SECONDS, START_SECONDS)
    except HelperDied as died:
        if died.took_too_long:
            raise ConfigError(f"{place}: measuring the model takes more than {MEASURE_SECONDS:g} CPU seconds") from None
        cause = "the machine is too busy" if died.was_starved else f"its process ended by signal {died.signal}"
        raise ConfigError(f"{place}: the model cannot be measured with transformers: {cause}") from None
    finally:
        note.cancel()
    return msgspec.msgpack.decode(answer, type=MeasuredConfig | Refused)


def _measuring_code() -> str:
    """Return a hash of the code that measures: its version alone would not change between releases."""
    folder = Path(__file__).resolve().parents[2].joinpath(*MODULE.split(".")[1:-1])
    return sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()


def _kept_file(key: str) -> Path | None:
    """Return the file that keeps a layout; None if this user cannot have one that is safe from other users."""
    try:
        return private_folder("measured") / sha256(key.encode()).hexdigest()[:32]
    except (OSError, RuntimeError) as error:
        log.warning(NOT_KEPT, reason=error)
        return None


def _read_kept(file: Path | None) -> MeasuredConfig | Refused | None:
    if file is not None:
        with suppress(OSError, msgspec.MsgspecError):  # none yet, or damaged
            return msgspec.msgpack.decode(file.read_bytes(), type=MeasuredConfig)
    return None


def _keep(file: Path | None, found: MeasuredConfig | Refused) -> None:
    if file is None or isinstance(found, Refused):
        return
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        scratch.write_bytes(msgspec.msgpack.encode(found))
        scratch.replace(file)
    except OSError as error:
        log.warning(NOT_KEPT, reason=error)
