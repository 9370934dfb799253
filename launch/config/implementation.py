"""Chooses what computes a model, Quire's own code or a class of transformers, and reads its shape."""

from pathlib import Path
from typing import Literal

import msgspec

from quire.launch.config.measured_layouts import divided_layout, measured_layout
from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import read_json
from quire.protocol.model.gguf_file import is_gguf
from quire.protocol.model.measured_config import Refused
from quire.protocol.model.model_config import (
    ModelConfig,
    config_file,
    is_native,
    load_model_config,
    named_architecture,
)
from quire.protocol.settings import EngineSettings

FLAG = "--model-impl"
RANKS_FLAG = "--tensor-parallel-size"
Implementation = Literal["auto", "native", "transformers"]


def read_model(folder: Path, wanted: Implementation = "auto") -> ModelConfig:
    """Read a checkpoint's shape; ``auto`` takes Quire's own code where there is any.

    Raises:
        ConfigError: one line with the file and the problem.
    """
    if is_gguf(folder):
        if wanted == "transformers":
            raise ConfigError(f"{FLAG} transformers needs a folder with safetensors, and {folder} is a GGUF file")
        return load_model_config(folder)
    path = config_file(folder)
    raw = read_json(path)
    architecture = named_architecture(raw)
    if wanted == "native" or (wanted == "auto" and is_native(architecture)):
        return load_model_config(folder)
    if not architecture:
        found = printable(raw.get("architectures"))
        raise ConfigError(f"{path}: architectures must name the model's class (got {found})")
    model = load_model_config(folder, measured_layout(path, raw))
    _check_format(model)
    return model


def check_implementation(settings: EngineSettings, model: ModelConfig, device: str) -> None:
    """Raise ConfigError for a setting that models of transformers, or those with latents, do not have.

    Args:
        device: cpu or cuda.
    """
    if model.latent is not None and settings.enable_lora:
        raise ConfigError(
            f"--enable-lora is not supported by Quire's own code for {model.architecture}, whose attention is over "
            f"latents: omit the flag, or set {FLAG} transformers"
        )
    if model.transformers is None:
        return
    _check_format(model)
    refused = {
        "--deterministic on a GPU": settings.deterministic and device != "cpu",
        "--deterministic with --tensor-parallel-size above 1": settings.deterministic
        and settings.tensor_parallel_size > 1,
        "--enable-lora": settings.enable_lora and not model.transformers.linears,
        "--enable-return-routed-experts": settings.enable_return_routed_experts,
    }
    flag = next((name for name, given in refused.items() if given), None)
    if flag is not None:
        raise ConfigError(
            f"{flag} is not supported for {model.architecture}, which transformers computes: {_advice(model)}"
        )


def for_ranks(model: ModelConfig, ranks: int) -> ModelConfig:
    """Return the model as each of several ranks computes it.

    Raises:
        ConfigError: transformers computes the model, and ranks cannot share it.
    """
    measured = model.transformers
    if measured is None or measured.ranks == ranks:
        return model
    found = divided_layout(RANKS_FLAG, measured, ranks)
    if isinstance(found, Refused):
        raise ConfigError(f"{RANKS_FLAG} {ranks}: the model {found.reason}: {_advice(model)}")
    return msgspec.structs.replace(model, transformers=found)


def _advice(model: ModelConfig) -> str:
    return "omit the flag" + (f", or set {FLAG} native" if is_native(model.architecture) else "")


def _check_format(model: ModelConfig) -> None:
    """Raise ConfigError if weights are to be quantised that are in no linear layer, such as joined experts."""
    measured = model.transformers
    if model.weight_format is not None and measured is not None and measured.outside:
        raise ConfigError(
            f"quantised weights are not supported for {measured.class_name} of transformers: most of its weights, such "
            f"as {measured.outside}, are in no linear layer: use a checkpoint in 16 bits, without --quantization"
        )
