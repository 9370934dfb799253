"""The ``adapter_config.json`` of a LoRA adapter in the format of PEFT: rank and scale of each module."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import re2

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.config_fields import Fields

CONFIG = "adapter_config.json"
MAX_PATTERNS = 4096
MAX_PATTERN_LENGTH = 256
_UNLIKE_RE = re.compile(r"\{,|\[:")
"""What RE2 reads as other than ``re``."""

Value = TypeVar("Value")

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


class NamePatterns(Generic[Value]):
    """Patterns of module names, and their values. They match as in PEFT: a whole name, or what follows one of its dots.

    RE2 matches without backtracking, in bounded memory and without the GIL, so that no pattern can stop a process.
    """

    def __init__(self, patterns: Mapping[str, Value], refuse: Callable[[str], Exception]) -> None:
        """``refuse``: makes the error, of a reason, for a pattern that is not supported or for patterns too complex."""
        self._values, self._refuse = list(patterns.values()), refuse
        options = re2.Options()
        options.log_errors = False
        self._set = re2.Set.FullMatchSet(options)
        for pattern in patterns:
            try:
                if len(pattern) > MAX_PATTERN_LENGTH or _UNLIKE_RE.search(pattern):
                    raise ValueError
                whole = rf"(.*\.)?({pattern})$"
                re.compile(pattern)  # "a)|(b" would leave the group
                re.compile(whole)  # RE2 has forms of its own
                self._set.Add(whole)
            except (ValueError, OverflowError, re.error, re2.error):
                text = f"at most {MAX_PATTERN_LENGTH} characters, in the common syntax of re and RE2"
                raise refuse(f"has the pattern {printable(pattern)}; supported: {text}") from None
        self._set.Add("(?s).*")
        try:
            self._set.Compile()
        except re2.error:
            raise self._too_complex() from None

    def find(self, name: str, default: Value) -> Value:
        """Return the value of the first pattern that matches a name."""
        matched: list[int] | None = self._set.Match(name)
        if not matched:  # not even the last one: RE2's memory did not suffice
            raise self._too_complex()
        first = min(matched)
        return self._values[first] if first < len(self._values) else default

    def _too_complex(self) -> Exception:
        return self._refuse("has patterns that are too complex together: merge or shorten them")


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
    rank_patterns: NamePatterns[int]
    alpha_patterns: NamePatterns[float]
    rslora: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the model."""
        return self.rank_patterns.find(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product."""
        alpha, rank = self.alpha_patterns.find(module, self.alpha), self.rank_of(module)
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
        rank_patterns=_patterns(field, "rank_pattern", rank),
        alpha_patterns=_patterns(field, "alpha_pattern", alpha),
        rslora=field.flag("use_rslora"),
    )


def _patterns(field: Fields, name: str, check: Callable[[object, str], Value]) -> NamePatterns[Value]:
    patterns = field.raw.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{field.where}: {name} must be an object with at most {MAX_PATTERNS} entries")
    values = {key: check(value, f"{name}[{printable(key)}]") for key, value in patterns.items()}
    return NamePatterns(values, lambda reason: AdapterError(f"{field.where}: {name} {reason}"))
