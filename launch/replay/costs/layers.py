"""Steps from a profile of single layers, taken on the machine itself: kernel times by tokens, rows and contexts.

A folder has what LLMServingSim's profiler writes, for one rank: ``profile_meta.yaml`` (model, gpu, and optionally
skew_fit and engine_effective), ``profile_dense.csv`` (layer, tokens, time_us), ``profile_per_sequence.csv`` (layer,
sequences, time_us) and ``profile_attention.csv`` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us); of a model
with experts also ``profile_moe.csv`` (tokens, activated_experts, time_us). A step is

    embedding + layers x (dense layers + attention) + final norm + head and sampler,

each at the tokens, or the requests, that the step has. What is not in it: scheduling (an asynchronous engine decides a
step while the last one runs) and the gaps between kernels (a captured graph has next to none).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quire.launch.replay.costs.csv_table import find_file, read_measured, read_points, read_text
from quire.launch.replay.costs.grid import Curve, Grid
from quire.launch.replay.costs.models import find_model
from quire.launch.replay.costs.sizes import expert_layers, num_experts_read
from quire.launch.replay.run.step_shape import StepShape
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig

DENSE, PER_SEQUENCE, ATTENTION = "profile_dense.csv", "profile_per_sequence.csv", "profile_attention.csv"
EXPERTS = "profile_moe.csv"

_ONCE = frozenset({"embedding", "final_layernorm"})
"""Dense layers that a model has one of; all others are in each layer."""

_TWICE = frozenset({"layernorm"})
"""One before attention, one before the feed-forward layers."""

_NEEDED = frozenset({"qkv_proj", "o_proj"})
_FEED_FORWARD = frozenset({"gate_up_proj", "down_proj"})
_UNLESS_EXPERTS = _FEED_FORWARD | {"act_fn"}
"""In the layers without experts only."""

_TOP = 16_384
"""Tokens up to which sums are ready."""


class LayerProfileCost:
    """Looks a step up: one sum for what goes by tokens, one for what goes by requests, and attention on its grid."""

    kv_bytes = 0

    def __init__(
        self, folder: Path, model: ModelConfig, name: str, captured: Sequence[int] = (), skew: float = 0.0
    ) -> None:
        """
        Args:
            model: for the number of layers.
            name: of the chip.
            captured: batch sizes of captured graphs, ascending: a smaller step is padded to the next. Empty: none are.
            skew: how far a batch of decodes with unequal contexts is from the time of one that has the mean, towards
                that of one that has the longest: 0 for not at all. The profile of attention has equal contexts only.

        Raises:
            ConfigError: a table is missing, or broken: names file and line.
        """
        self._told = f"profiled layers of {model.num_layers} on {name}, from {folder}"
        self._by_tokens = _padded(_token_times(folder, model), captured)
        sequences = _layer_points(_table(folder, PER_SEQUENCE), "sequences", frozenset({"lm_head"}))
        self._by_sequences = Curve(_sum(sequences, dict.fromkeys(sequences, 1)), _TOP)
        self._attention = AttentionGrids(_table(folder, ATTENTION), skew)
        self._layer_seconds = model.num_layers * 1e-6

    def seconds(self, step: StepShape) -> float:
        micros = self._by_tokens.at(step.num_tokens)
        micros += self._by_sequences.at(step.num_decodes + len(step.prefills))
        return micros * 1e-6 + self._attention.micros(step) * self._layer_seconds

    def describe(self) -> str:
        return f"table: {self._told}"


def is_layer_profile(folder: Path) -> bool:
    return find_file(folder, DENSE) is not None


def load_layer_profile(folder: Path, model: ModelConfig | None, tensor_parallel_size: int) -> LayerProfileCost:
    """
    Args:
        model: None: the one that ``profile_meta.yaml`` names.

    Raises:
        ConfigError: a file is missing or broken, the model is not known, or there is more than one rank.
    """
    if tensor_parallel_size > 1:
        raise ConfigError(f"{folder}: its layers are of 1 rank (got {tensor_parallel_size}): use roofline:CONFIG,CHIP")
    meta = _meta(folder)
    if model is None:
        if not isinstance(meta.get("model"), str):
            raise ConfigError(f"{folder}: no profile_meta.yaml names the model: use table:DIR,CONFIG")
        model = find_model(meta["model"])
    most = _part(meta, "engine_effective").get("max_num_seqs", 256)
    captured = captured_sizes(min(2 * most, 512) if isinstance(most, int) else 512)
    fit = _part(meta, "skew_fit")
    skew = (_part(_part(fit, "per_tp"), 1) or fit).get("alpha_default")
    skew = float(skew) if isinstance(skew, int | float) and 0 <= skew <= 1 else 0.0
    return LayerProfileCost(folder, model, str(meta.get("gpu", folder.name)), captured, skew)


def _meta(folder: Path) -> dict[Any, Any]:
    path = find_file(folder, "profile_meta.yaml")
    try:
        meta = yaml.safe_load(read_text(path)) if path is not None else {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(meta, dict):
        raise ConfigError(f"{path}: must be a mapping")
    return meta


def _part(whole: dict[Any, Any], key: object) -> dict[Any, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


class AttentionGrids:
    """Microseconds of one layer's attention: of decodes alone, of prefills alone, and of both in one batch.

    Three grids, for kernels take another way where every query is one token, and there is nothing between one decode
    and none.
    """

    def __init__(self, path: Path, skew: float = 0.0) -> None:
        """``skew``: see LayerProfileCost."""
        self._skew = skew
        points = read_points(path, ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), "time_us")
        decodes = {p[2:]: t for p, t in points.items() if p[0] == 0 and p[2] > 0}
        prefills = {p[:2]: t for p, t in points.items() if p[0] > 0 and p[2] == 0}
        mixed = {p: t for p, t in points.items() if p[0] > 0 and p[2] > 0}
        for kind, found in (("decodes alone", decodes), ("prefills alone", prefills), ("both", mixed)):
            if not found:
                raise ConfigError(f"{path}: no row has {kind}")
        self._decodes, self._prefills, self._mixed = Grid(decodes), Grid(prefills), Grid(mixed)

    def micros(self, step: StepShape) -> float:
        decodes, prefills = step.num_decodes, step.prefills
        if not prefills:
            return self._spread(step) if decodes else 0.0
        if len(prefills) == 1:
            return self._spread(step, *prefills[0])
        chunk, before = as_one(prefills)
        together = self._prefills.at(chunk, before)
        apart = sum(self._prefills.at(*each) for each in prefills)
        saved = max(together - apart, 0.0)  # several short prompts score fewer pairs than one long one
        return self._spread(step, chunk, before) - saved

    def _spread(self, step: StepShape, chunk: float = 0, before: float = 0) -> float:
        """Of the step's decodes beside one prefill, if any; between equal contexts and the longest, by ``skew``."""
        decodes = step.num_decodes
        if not decodes:
            return self._prefills.at(chunk, before)
        mean = step.decode_context / decodes
        grid, x = (self._mixed, (chunk, before, decodes)) if chunk else (self._decodes, (decodes,))
        if not self._skew or step.longest_decode <= mean:
            return grid.at(*x, mean)
        equal, longest = grid.at_both(x, mean, step.longest_decode)
        return equal + self._skew * max(longest - equal, 0.0)


def as_one(prefills: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """(tokens, context before them) of the one prefill that scores as many pairs as all these do together.

    A context of 0 where they score fewer than one prompt of as many tokens would.
    """
    tokens = sum(chunk for chunk, _ in prefills)
    pairs = sum(chunk * (before + chunk / 2) for chunk, before in prefills)
    return tokens, max(pairs / tokens - tokens / 2, 0.0)


def captured_sizes(most_tokens: int) -> list[int]:
    """Batch sizes of which an engine such as vLLM captures graphs: 1, 2, 4, every 8 to 256, every 16 beyond."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most_tokens + 1, 16)]
    return [size for size in sizes if size <= most_tokens]


def _padded(micros: Mapping[int, float], captured: Sequence[int]) -> Curve:
    """By tokens; a step that fits a captured graph is as long as that graph is."""
    curve = Curve(micros, _TOP)
    below = 0
    for size in captured:
        for tokens in range(below + 1, size):
            curve.values[tokens] = curve.values[size]
        below = size
    return curve


def _token_times(folder: Path, model: ModelConfig) -> dict[int, float]:
    """Microseconds by tokens: dense layers and experts, each as many times as the model has them."""
    with_experts = expert_layers(model)
    without = model.num_layers - with_experts
    dense = _layer_points(_table(folder, DENSE), "tokens", _NEEDED | (_FEED_FORWARD if without else frozenset()))
    times = {name: _times(name, model.num_layers, without) for name in dense}
    sums = _sum(dense, times)
    if with_experts:
        experts = Grid(read_points(_table(folder, EXPERTS), ("tokens", "activated_experts"), "time_us"))
        for tokens in sums:
            sums[tokens] += with_experts * experts.at(tokens, num_experts_read(model, tokens))
    return sums


def _times(name: str, num_layers: int, num_without_experts: int) -> int:
    if name in _ONCE:
        return 1
    layers = num_without_experts if name in _UNLESS_EXPERTS else num_layers
    return 2 * layers if name in _TWICE else layers


def _table(folder: Path, name: str) -> Path:
    path = find_file(folder, name)
    if path is None:
        raise ConfigError(f"{folder}: no {name}, which a profile of layers has")
    return path


def _layer_points(path: Path, key: str, needed: frozenset[str]) -> dict[str, dict[int, float]]:
    """Microseconds by layer and number."""
    points: dict[str, dict[int, float]] = {}
    for line, (layer, number), micros in read_measured(path, ("layer", key), "time_us"):
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"{path}:{line}: {key} must be a whole number from 1, not {number!r}")
        points.setdefault(layer, {})[int(number)] = micros
    if missing := sorted(needed - points.keys()):
        raise ConfigError(f"{path}: no row has layer {', '.join(missing)}")
    return points


def _sum(layers: Mapping[str, Mapping[int, float]], times: Mapping[str, int]) -> dict[int, float]:
    """All layers, each as many times as it is run, at every number at which any was measured."""
    numbers = sorted({number for points in layers.values() for number in points})
    curves = {name: Curve(points, numbers[-1]) for name, points in layers.items()}
    return {number: sum(times[name] * curve.at(number) for name, curve in curves.items()) for number in numbers}
