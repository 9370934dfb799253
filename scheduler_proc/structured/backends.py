"""From the configuration to the library that it names."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.request.grammar_checks import GrammarRefused
from quire.scheduler_proc.structured.backend import GrammarBackend

BACKENDS = ("llguidance", "xgrammar")


def backend_maker(config: EngineConfig) -> Callable[[], GrammarBackend]:
    """What makes the backend, which takes its time: in another thread, at the first request that needs it.

    The maker raises GrammarRefused where no grammar can be matched with this model.

    Raises:
        ConfigError: the library is unknown, or not installed.
    """
    name = config.structured_outputs_backend
    if name not in BACKENDS:
        raise ConfigError(f"structured_outputs_backend must be {' or '.join(BACKENDS)}, not {name!r}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"structured_outputs_backend={name} needs the package {name}: pip install quire[{name}]")
    return lambda: make_backend(config)


def make_backend(config: EngineConfig) -> GrammarBackend:
    """Reads the checkpoint's tokenizer. Raises GrammarRefused where no grammar can be matched with this model."""
    model = config.model
    path = Path(config.model_path) / "tokenizer.json"
    if not config.model_path or not path.is_file():
        raise GrammarRefused("this model has no tokenizer, so its answers cannot be structured")
    if not model.eos_token_ids:
        raise GrammarRefused("this model has no end-of-text token, so its answers cannot be structured")
    try:
        text = path.read_text(encoding="utf-8")
        if config.structured_outputs_backend == "xgrammar":
            from quire.scheduler_proc.structured.xgrammar_backend import XGrammarBackend

            return XGrammarBackend(json.loads(text), model.vocab_size, model.eos_token_ids)
        from quire.scheduler_proc.structured.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(text, model.vocab_size, model.eos_token_ids)
    except (OSError, ValueError, KeyError, RuntimeError):
        raise GrammarRefused("this model's tokenizer cannot be used for structured answers") from None
