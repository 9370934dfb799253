"""Settings about what a checkpoint brings for requests: sampling defaults, the chat template; and closed objects."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.protocol.errors import ConfigError, InvalidRequest, did_you_mean
from quire.protocol.request.sampling_params import SamplingParams

FILE = "generation_config.json"
NO_FILE = "vllm"
NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of ``generation_config.json`` that take effect, and their names as sampling parameters."""
MAX_PATH = 4096


def sampling_defaults(folder: Path | None, wanted: str) -> dict[str, int | float]:
    """Return the sampling parameters in ``generation_config.json`` that differ from the engine's.

    Args:
        wanted: ``auto`` (the file of the checkpoint in ``folder``, if there is one), ``vllm`` (none), or a folder.

    Raises:
        ConfigError: the folder has no such file, or the file has a value out of range.
    """
    if wanted == NO_FILE or (wanted == "auto" and folder is None):
        return {}
    path = (folder if wanted == "auto" and folder is not None else Path(wanted).expanduser()) / FILE
    if not path.is_file():
        if wanted == "auto":
            return {}
        raise ConfigError(f"--generation-config must be auto, vllm or a folder with {FILE} (got {wanted[:MAX_PATH]!r})")
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        raise ConfigError(f"{path}: cannot be read as a JSON object") from None
    found = {NAMES[key]: value for key, value in given.items() if key in NAMES and value is not None}
    try:
        params = SamplingParams(**found)
    except InvalidRequest as error:
        advice = f"correct the file, or start with --generation-config {NO_FILE}"
        raise ConfigError(f"{path}: {error.message}: {advice}") from None
    engine = SamplingParams()
    return {name: getattr(params, name) for name in found if getattr(params, name) != getattr(engine, name)}


def chat_template_source(given: str | None) -> str:
    """Return the template of ``--chat-template``, a file or the template's own text; "" if not given.

    Raises:
        ConfigError: the file cannot be read, or the template is not valid Jinja.
    """
    if not given:
        return ""
    is_text = any(char in given for char in "{}\n")
    path = None if is_text else Path(given).expanduser()
    try:
        source = given if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise ConfigError(
            f"--chat-template must be a file with a template, or the template's text (got {given[:MAX_PATH]!r})"
        ) from None
    from quire.frontend.text.chat_template import check_template

    check_template(source, "--chat-template")
    return source


def closes_objects(given: Mapping[str, Any] | None) -> bool:
    """Return whether objects of a JSON schema are closed, from ``--structured-outputs-config``.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type.
    """
    flag, name = "--structured-outputs-config", "disable_additional_properties"
    for key in given or {}:
        if key == "backend":
            raise ConfigError(f"{flag}: unknown key 'backend': use --structured-outputs-backend")
        if key != name:
            raise ConfigError(f"{flag}: unknown key {key[:64]!r}{did_you_mean(key, [name])}")
    closed = (given or {}).get(name, True)
    if not isinstance(closed, bool):
        raise ConfigError(f"{flag}: {name} must be true or false (got {closed!r:.64})")
    return closed
