"""``--speculative-config``: vLLM's keys and two of ours, checked and turned into the engine's settings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.protocol.config import SpeculativeConfig
from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.checkpoint import stored_tensors
from quire.protocol.model.model_config import ModelConfig, load_model_config

FLAG = "--speculative-config"
MAX_DRAFTS = 32
DEFAULT_LOOKUP = (2, 5)
DEFAULT_DEPTH = 24
RANGES: dict[str, tuple[int, int]] = {
    "num_speculative_tokens": (1, MAX_DRAFTS),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
}
# The keys that only one method looks at.
METHOD_OF_KEY = {
    "model": "draft_model",
    "prompt_lookup_min": "ngram",
    "prompt_lookup_max": "ngram",
    "suffix_decoding_max_tree_depth": "suffix",
    "suffix_decoding_max_cached_requests": "suffix",
}


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """The keys as a user gives them; None means: decide for me."""

    method: Literal["ngram", "suffix", "draft_model"] | None = None
    num_speculative_tokens: int | None = None
    model: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    acceptance: Literal["shared_noise", "rejection"] = "shared_noise"
    adaptive: bool = True


def parse_speculative(
    given: Mapping[str, Any], model: ModelConfig, find_model: Callable[[str], Path], *, with_weights: bool
) -> tuple[SpeculativeConfig, int]:
    """The engine's settings, and how many drafts one request may have in a step.

    Args:
        model: the one that is served; a draft model must have its vocabulary.
        find_model: the checkpoint folder of a name; raises ConfigError.
        with_weights: whether weights will be read, so that a broken checkpoint is refused here.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value out of range, or keys that do not go together.
    """
    keys = _convert(given)
    method = _method(keys)
    low, high = _lookup(keys)
    depth = keys.suffix_decoding_max_tree_depth or DEFAULT_DEPTH
    cached = keys.suffix_decoding_max_cached_requests
    count = keys.num_speculative_tokens or (min(depth, MAX_DRAFTS) if method == "suffix" else None)
    if count is None:
        raise ConfigError(f"{FLAG}: num_speculative_tokens must be from 1 to {MAX_DRAFTS}")
    draft, folder = _draft_model(keys.model, model, find_model, with_weights) if method == "draft_model" else (None, "")
    chosen = SpeculativeConfig(
        method=method,
        model=draft,
        model_path=folder,
        prompt_lookup_min=low,
        prompt_lookup_max=high,
        suffix_max_depth=depth,
        suffix_max_cached_requests=1000 if cached is None else cached,
        acceptance=keys.acceptance,
        adaptive=keys.adaptive,
    )
    return chosen, count


def _convert(given: Mapping[str, Any]) -> _Given:
    known = _Given.__struct_fields__
    for key in given:
        if key not in known:
            raise ConfigError(f"{FLAG}: unknown key {key!r}{did_you_mean(str(key), known)}")
    try:
        return msgspec.convert(dict(given), _Given)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG}: {error}") from None


def _method(keys: _Given) -> str:
    """The method, which all the other keys go with and are in range for."""
    for name, (low, high) in RANGES.items():
        value = getattr(keys, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{FLAG}: {name} must be from {low} to {high}, not {value}")
    method = keys.method or ("draft_model" if keys.model is not None else None)
    if method is None:
        raise ConfigError(f"{FLAG}: method must be ngram, suffix or draft_model")
    for name, its_method in METHOD_OF_KEY.items():
        if getattr(keys, name) is not None and method != its_method:
            raise ConfigError(f"{FLAG}: {name} is for the method {its_method}, not for {method}")
    if keys.acceptance == "rejection" and method != "draft_model":
        raise ConfigError(f"{FLAG}: acceptance rejection needs the method draft_model")
    return method


def _lookup(keys: _Given) -> tuple[int, int]:
    """Of the two lengths, one that is not given is the other."""
    low, high = keys.prompt_lookup_min, keys.prompt_lookup_max
    if low is None and high is None:
        return DEFAULT_LOOKUP
    low, high = high if low is None else low, low if high is None else high
    assert low is not None
    assert high is not None
    if low > high:
        raise ConfigError(f"{FLAG}: prompt_lookup_min must be at most prompt_lookup_max, not {low} and {high}")
    return low, high


def _draft_model(
    name: str | None, model: ModelConfig, find_model: Callable[[str], Path], with_weights: bool
) -> tuple[ModelConfig, str]:
    if name is None:
        raise ConfigError(f"{FLAG}: the method draft_model needs model, the draft model's folder")
    folder = find_model(name)
    draft = load_model_config(folder)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{FLAG}: the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of "
            f"{model.vocab_size}: they must be equal"
        )
    if with_weights:
        stored_tensors(folder)
    return draft, str(folder)
