"""``--speculative-config``: vLLM's keys plus ``acceptance`` and ``adaptive``, checked and converted."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from quire.launch.config.declared import convert, declared
from quire.launch.config.implementation import read_model
from quire.protocol.config import SpeculativeConfig
from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.settings import Setting

FLAG = "--speculative-config"
MAX_DRAFTS = 32
DEFAULT_LOOKUP = (2, 5)
DEFAULT_DEPTH = 24
DEFAULT_CACHED = 1000
COMMON, NGRAM, SUFFIX, DRAFT_MODEL = "Any method", "ngram", "suffix", "draft_model"
"""Topics of the keys: a key under a method's topic is allowed for that method only."""


class SpeculativeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys as the user gives them; None: not given."""

    method: Annotated[
        Literal["ngram", "suffix", "draft_model"] | None,
        Setting(
            COMMON,
            "proposer of draft tokens. `ngram`: the tokens that followed the same last tokens earlier in the "
            "request; `suffix`: the same, also over earlier answers; `draft_model`: samples of a smaller model",
            default="`draft_model` if `model` is given",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Setting(
            COMMON,
            "maximum number of draft tokens per request and step",
            range=(1, MAX_DRAFTS),
            default="the tree's depth for `suffix`; required for other methods",
        ),
    ] = None
    acceptance: Annotated[
        Literal["shared_noise", "rejection"],
        Setting(
            COMMON,
            "rule of acceptance. `shared_noise`: a draft token is accepted if it equals the token that is sampled "
            "without drafts, so the text does not change. `rejection` (`draft_model` only): rejection sampling, which "
            "accepts more; the text changes, its distribution does not",
        ),
    ] = "shared_noise"
    adaptive: Annotated[
        bool, Setting(COMMON, "propose fewer draft tokens, down to none, while they do not save time")
    ] = True
    prompt_lookup_min: Annotated[
        int | None,
        Setting(NGRAM, "minimum length of the matching n-gram", range=(1, 64), default=str(DEFAULT_LOOKUP[0])),
    ] = None
    prompt_lookup_max: Annotated[
        int | None,
        Setting(NGRAM, "maximum length of the matching n-gram", range=(1, 64), default=str(DEFAULT_LOOKUP[1])),
    ] = None
    suffix_decoding_max_tree_depth: Annotated[
        int | None,
        Setting(SUFFIX, "maximum depth of the suffix tree, in tokens", range=(2, 256), default=str(DEFAULT_DEPTH)),
    ] = None
    suffix_decoding_max_cached_requests: Annotated[
        int | None,
        Setting(
            SUFFIX, "number of earlier answers in the suffix tree", range=(0, 1_000_000), default=str(DEFAULT_CACHED)
        ),
    ] = None
    model: Annotated[
        str | None, Setting(DRAFT_MODEL, "folder or id of the draft model, which must have the same vocabulary")
    ] = None


def parse_speculative(
    given: Mapping[str, Any], model: ModelConfig, find_model: Callable[[str], Path], *, with_weights: bool
) -> tuple[SpeculativeConfig, int]:
    """Return the engine's settings and the maximum number of draft tokens per request and step.

    Args:
        model: the served model; a draft model must have the same vocabulary.
        find_model: returns the checkpoint folder of a name, or raises ConfigError.
        with_weights: whether weights will be read, so that a broken checkpoint is refused here.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value out of range, or contradicting keys.
    """
    keys = _convert(given)
    method = _method(keys)
    low, high = _lookup(keys)
    depth = keys.suffix_decoding_max_tree_depth or DEFAULT_DEPTH
    cached = keys.suffix_decoding_max_cached_requests
    count = keys.num_speculative_tokens or (min(depth, MAX_DRAFTS) if method == "suffix" else None)
    if count is None:
        raise ConfigError(f"{FLAG}: the method {method} needs num_speculative_tokens, from 1 to {MAX_DRAFTS}")
    draft, folder = _draft_model(keys.model, model, find_model, with_weights) if method == "draft_model" else (None, "")
    chosen = SpeculativeConfig(
        method=method,
        model=draft,
        model_path=folder,
        prompt_lookup_min=low,
        prompt_lookup_max=high,
        suffix_max_depth=depth,
        suffix_max_cached_requests=DEFAULT_CACHED if cached is None else cached,
        acceptance=keys.acceptance,
        adaptive=keys.adaptive,
    )
    return chosen, count


def _convert(given: Mapping[str, Any]) -> SpeculativeKeys:
    known = SpeculativeKeys.__struct_fields__
    for key in given:
        if key not in known:
            raise ConfigError(f"{FLAG}: unknown key {key!r}{did_you_mean(str(key), known)}")
    return convert(given, SpeculativeKeys, FLAG)


def _method(keys: SpeculativeKeys) -> str:
    """Return the method after checking that every other key is in range and allowed with it."""
    given = [(each, getattr(keys, each.name)) for each in declared(SpeculativeKeys)]
    for each, value in given:
        low, high = each.setting.range or (0, 0)
        if each.setting.range and value is not None and not low <= value <= high:
            raise ConfigError(f"{FLAG}: {each.name} must be from {low} to {high}, not {value}")
    method = keys.method or ("draft_model" if keys.model is not None else None)
    if method is None:
        raise ConfigError(f"{FLAG}: needs method, which is ngram, suffix or draft_model")
    for each, value in given:
        if value is not None and each.setting.topic not in (COMMON, method):
            raise ConfigError(f"{FLAG}: {each.name} is for the method {each.setting.topic}, not for {method}")
    if keys.acceptance == "rejection" and method != "draft_model":
        raise ConfigError(f"{FLAG}: acceptance rejection needs the method draft_model")
    return method


def _lookup(keys: SpeculativeKeys) -> tuple[int, int]:
    """Return the minimum and maximum n-gram length. If only one is given, the other is equal to it."""
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
    draft = read_model(folder)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{FLAG}: the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of "
            f"{model.vocab_size}: they must be equal"
        )
    if not draft.generates:
        raise ConfigError(f"{FLAG}: the draft model has no head for tokens, and cannot generate: choose another one")
    if with_weights:
        draft = with_stored_format(folder, stored_tensors(folder, renamed=draft.transformers is None), draft)
    return draft, str(folder)
