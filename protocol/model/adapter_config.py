"""The ``adapter_config.json`` of a LoRA adapter in the format of PEFT: rank and scale of each module."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields

CONFIG = "adapter_config.json"
MAX_PATTERNS = 4096
MAX_PATTERN_LENGTH = 256
MAX_QUANTIFIERS = 3

_REFUSED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "velora_config": "VeLoRA is not supported",
    "lora_bias": "biases of an adapter are not supported",
    "fan_in_fan_out": "transposed weights are not supported",
    "layer_replication": "replicated layers are not supported",
    "modules_to_save": "only LoRA matrices are supported, no whole modules: merge it into the model",
    "trainable_token_indices": "trained embeddings of tokens are not supported",
}
"""Settings that change what an adapter computes, so that it cannot be served: why."""

_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of ``init_lora_weights`` with which training changed the model's own weights too."""


class AdapterError(ConfigError):
    """An adapter cannot be served; one line that names the folder, the value, and what is allowed."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """
    Attributes:
        rank, alpha: of modules that no pattern matches.
        rank_patterns, alpha_patterns: values of the modules that a pattern matches; the first one counts.
        rslora: scales are ``alpha / sqrt(rank)`` (arXiv 2312.03732) instead of ``alpha / rank`` (arXiv 2106.09685).
    """

    rank: int
    alpha: float
    rank_patterns: tuple[tuple[re.Pattern[str], int], ...]
    alpha_patterns: tuple[tuple[re.Pattern[str], float], ...]
    rslora: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model."""
        return next((rank for pattern, rank in self.rank_patterns if pattern.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product."""
        alpha = next((alpha for pattern, alpha in self.alpha_patterns if pattern.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def parse_adapter_config(raw: dict[str, Any], path: Path, max_rank: int) -> AdapterConfig:
    """Return the settings of an adapter.

    Raises:
        AdapterError: it is not a LoRA adapter, or a setting is refused, of a wrong type or out of range.
    """
    try:
        return _parse(Fields(raw, str(path)), max_rank)
    except AdapterError:
        raise
    except ConfigError as error:
        raise AdapterError(str(error)) from None


def _parse(field: Fields, max_rank: int) -> AdapterConfig:
    raw, where = field.raw, field.where
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{where}: peft_type must be 'LORA' (got {printable(raw.get('peft_type'))})")
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise AdapterError(f"{where}: {name} is set: {reason}")
    if raw.get("bias") not in (None, "none"):
        raise AdapterError(f"{where}: bias must be 'none' (got {printable(raw['bias'])})")
    initial = raw.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGES_MODEL):
        raise AdapterError(
            f"{where}: init_lora_weights {printable(initial)} has changed the model's own weights too: convert the "
            "adapter to plain LoRA when it is saved"
        )

    def rank(value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= max_rank:
            raise AdapterError(
                f"{where}: {name} must be an integer from 1 to {max_rank} (got {printable(value)}): the highest rank "
                "is that of --max-lora-rank"
            )
        return value

    def alpha(value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise AdapterError(f"{where}: {name} must be a number from 0 to 1e6 (got {printable(value)})")
        return float(value)

    return AdapterConfig(
        rank=rank(raw.get("r"), "r"),
        alpha=alpha(raw.get("lora_alpha"), "lora_alpha"),
        rank_patterns=tuple(_patterns(field, "rank_pattern", rank)),
        alpha_patterns=tuple(_patterns(field, "alpha_pattern", alpha)),
        rslora=field.flag("use_rslora"),
    )


def _patterns(field: Fields, name: str, check: Callable[[object, str], Any]) -> list[tuple[re.Pattern[str], Any]]:
    """Return the patterns of a setting, each with its value. A pattern matches the end of a module's name, as in PEFT.

    Patterns with many quantifiers are refused: they can take for ever.
    """
    patterns = field.raw.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{field.where}: {name} must be an object with at most {MAX_PATTERNS} entries")
    compiled = []
    for pattern, value in patterns.items():
        quantifiers = re.findall(r"(?<!\\)[*+?{]", pattern)
        if len(pattern) > MAX_PATTERN_LENGTH or len(quantifiers) > MAX_QUANTIFIERS or re.search(r"\)[*+?{]", pattern):
            raise AdapterError(
                f"{field.where}: a pattern of {name} must have at most {MAX_PATTERN_LENGTH} characters and "
                f"{MAX_QUANTIFIERS} quantifiers, none of them after a group (got {printable(pattern)})"
            )
        try:
            made = re.compile(rf"(?:.*\.)?(?:{pattern})$")
        except re.error:
            raise AdapterError(f"{field.where}: {name} {printable(pattern)} is not a valid pattern") from None
        compiled.append((made, check(value, f"{name}[{printable(pattern)}]")))
    return compiled
