"""The name of the files of a checkpoint that a worker loads."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from socket import gethostname

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint_digest import begin_digest, checkpoint_state


def name_loaded_files(config: EngineConfig) -> Callable[[], str]:
    """Call this before the first file is read, and the returned function after the last, for ``Ready.files``.

    Raises:
        ConfigError: there are no files.
    """
    path = Path(config.weights_path)
    try:
        before = checkpoint_state(path) if config.weights_path else ""
    except OSError as error:
        where = f"{gethostname()} cannot read the model {path}: {error.strerror}"
        raise ConfigError(f"{where}: it must be at the same path on each machine") from None
    fingerprint = begin_digest(path) if before and config.uses_nodes else None

    def name() -> str:
        with suppress(OSError):  # removed meanwhile
            digest, state = (before, before) if fingerprint is None else fingerprint.result()
            if not before or before == state == checkpoint_state(path):
                return digest
        return secrets.token_hex(16)

    return name
