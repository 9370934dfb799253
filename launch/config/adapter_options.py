"""Settings of LoRA adapters: checks, names and folders."""

import contextlib
from pathlib import Path

import msgspec

from quire.frontend.serve_options import ServeOptions
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError, printable
from quire.protocol.settings import EngineSettings


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form of ``--lora-modules``. The model of an adapter is the server's: ``base_model_name`` is ignored."""

    name: str
    path: str
    base_model_name: str | None = None


def check_adapter_sizes(options: EngineSettings) -> None:
    """Raise ConfigError if sizes of adapters contradict each other."""
    least = options.max_loras + 1
    if options.enable_lora and options.max_cpu_loras < least:
        raise ConfigError(f"--max-cpu-loras must be at least {least} (--max-loras + 1), not {options.max_cpu_loras}")


def with_adapters(engine: EngineOptions, server: ServeOptions) -> tuple[EngineOptions, ServeOptions]:
    """Return the settings of a server; those of its adapters turn adapters on, and their paths are absolute.

    Raises:
        ConfigError: ``--lora-modules`` has another form than NAME=FOLDER, or ``--lora-dir`` is not a folder.
    """
    if not server.lora_modules and not server.lora_dir:
        return engine, server
    modules = [f"{name}={folder.absolute()}" for name, folder in parse_modules(server.lora_modules or [])]
    folder = server.lora_dir and str(Path(server.lora_dir).expanduser().absolute())
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"--lora-dir {folder} is not a folder")
    engine = msgspec.structs.replace(engine, enable_lora=True)
    return engine, msgspec.structs.replace(server, lora_modules=modules, lora_dir=folder)


def parse_modules(modules: list[str]) -> list[tuple[str, Path]]:
    """Return name and folder of each value of ``--lora-modules``; raise ConfigError if one has another form."""
    found = []
    for each in modules:
        name, _, folder = each.partition("=")
        if each.startswith("{"):
            name = ""
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                name, folder, _ = msgspec.structs.astuple(msgspec.json.decode(each, type=_Module))
        if not name or "=" in name or not folder:
            form = 'NAME=FOLDER or {"name": NAME without =, "path": FOLDER}'
            raise ConfigError(f"--lora-modules must be {form}, not {printable(each)}")
        found.append((name, Path(folder).expanduser()))
    return found
