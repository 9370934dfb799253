"""API keys of the server: from flags, a file or the environment; hidden in the process's command line."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.frontend.serve_options import ServeOptions
from quire.protocol.errors import ConfigError

MAX_FILE_BYTES = 1024 * 1024
# Position of the start of the arguments in /proc/self/stat, after the process's name.
ARG_START = 45


def read_api_keys(options: ServeOptions) -> list[str]:
    """Return the keys of ``--api-key`` and ``--api-key-file``, or that of QUIRE_API_KEY if neither is given.

    Raises:
        ConfigError: the file cannot be read or has no keys, or a key cannot be sent in a header.
    """
    return read_keys("api-key", options.api_key, options.api_key_file)


def read_admin_keys(options: ServeOptions, api_keys: Sequence[str]) -> list[str]:
    """Return the keys of the administrator's routes, from flags as ``read_api_keys``.

    Raises:
        ConfigError: as ``read_api_keys``; or a key is one of ``api_keys``, so that any user would be an administrator.
    """
    keys = read_keys("admin-api-key", options.admin_api_key, options.admin_api_key_file)
    if set(keys) & set(api_keys):
        raise ConfigError("--admin-api-key must not be an API key of --api-key: use a key of its own")
    return keys


def read_keys(flag: str, given: Sequence[str] | None, file: str | None) -> list[str]:
    """Return the keys of ``--flag`` and ``--flag-file``, or that of the variable QUIRE_FLAG if neither is given.

    Raises:
        ConfigError: as ``read_api_keys``.
    """
    keys = list(given or ())
    if file is not None:
        keys += _keys_of(Path(file), f"--{flag}-file")
    variable = f"QUIRE_{flag.upper().replace('-', '_')}"
    keys = keys or [key for key in [os.environ.get(variable, "")] if key]
    for key in keys:
        if not key or key != key.strip() or not key.isprintable():
            raise ConfigError(f"keys of --{flag} must be printable, not empty, and not start or end with a space")
    return keys


def _keys_of(path: Path, flag: str) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: must be text in UTF-8") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if len(data) > MAX_FILE_BYTES or not keys:  # without a key, the server would be open
        raise ConfigError(f"{flag} {path}: must have 1 or more lines with a key, in at most 1 MiB")
    return keys


def hide_in_command_line(secrets: Iterable[str]) -> None:
    """Overwrite ``secrets`` in the arguments of this process, which every user of the machine can read.

    No effect on systems without /proc. Before this call they are visible, so a file is the better place.
    """
    try:
        arguments = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(field) for field in fields[ARG_START : ARG_START + 2])
    except (OSError, ValueError):
        return
    if end - start != len(arguments):
        return
    hidden = arguments
    for secret in secrets:
        text = os.fsencode(secret)
        for prefix in (b"\0", b"\0--api-key=", b"\0--admin-api-key="):
            hidden = hidden.replace(prefix + text + b"\0", prefix + b"*" * len(text) + b"\0")
    if hidden != arguments and ctypes.string_at(start, len(arguments)) == arguments:
        ctypes.memmove(start, hidden, len(hidden))
