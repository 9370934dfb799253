"""The adapters of ``--lora-modules``, which are checked before the engine starts."""

import time
from collections.abc import Collection

import msgspec

from quire.frontend.adapters.names import NamedAdapter, name_problem
from quire.frontend.adapters.reader import AdapterReader
from quire.launch.config.adapter_options import parse_modules
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError, printable


def read_modules(modules: list[str], config: EngineConfig, served_names: Collection[str]) -> list[NamedAdapter]:
    """Read the adapters of ``--lora-modules``.

    Raises:
        ConfigError: a name cannot be used, or a folder has no adapter that the model can use, with the reason.
    """
    reader = AdapterReader(config.model, config.max_lora_rank)
    found: dict[str, NamedAdapter] = {}
    for name, folder in parse_modules(modules):
        if problem := name_problem(name):
            raise ConfigError(f"--lora-modules: {problem}")
        if name in found or name in served_names:
            owner = "an adapter" if name in found else "the served model"
            raise ConfigError(f"--lora-modules: {printable(name)} is the name of {owner} already")
        try:
            adapter = reader.read(folder)
        except FileNotFoundError:
            raise ConfigError(f"--lora-modules: {folder} is not a folder") from None
        found[name] = msgspec.structs.replace(adapter, name=name, created=int(time.time()))
    return list(found.values())
