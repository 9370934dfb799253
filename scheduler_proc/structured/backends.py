"""Selects the grammar library that the configuration names."""

import importlib.util
import json
from pathlib import Path

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.descriptions import TOKENIZER, read_description
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.scheduler_proc.structured.backend import GrammarBackend
from quire.version import install_command

BACKENDS = ("llguidance", "xgrammar")


def check_backend(config: EngineConfig) -> None:
    """Raise ConfigError if the configured library is unknown or not installed."""
    name = config.structured_outputs_backend
    if name not in BACKENDS:
        raise ConfigError(f"structured_outputs_backend must be {' or '.join(BACKENDS)} (got {name!r})")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"structured_outputs_backend={name} needs the package {name}: {install_command(name)}")


def make_backend(config: EngineConfig) -> GrammarBackend:
    """Make the backend from the checkpoint's tokenizer. Raises GrammarRefused when this model cannot use grammars."""
    model = config.model
    text = None
    if config.model_path:
        try:
            text = read_description(Path(config.model_path), TOKENIZER)
        except (OSError, ValueError, ConfigError):
            raise GrammarRefused("structured_outputs do not support this model's tokenizer") from None
    if text is None:
        raise GrammarRefused("structured_outputs need a tokenizer, which this model does not have")
    if not model.eos_token_ids:
        raise GrammarRefused("structured_outputs need an end-of-text token, which this model does not have")
    try:
        if config.structured_outputs_backend == "xgrammar":
            from quire.scheduler_proc.structured.xgrammar_backend import XGrammarBackend

            return XGrammarBackend(
                json.loads(text), model.vocab_size, model.eos_token_ids, closes_objects=config.closed_objects
            )
        from quire.scheduler_proc.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(text, model.vocab_size, model.eos_token_ids, closes_objects=config.closed_objects)
    except (OSError, ValueError, KeyError, RuntimeError):
        raise GrammarRefused("structured_outputs do not support this model's tokenizer") from None
