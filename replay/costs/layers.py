"""A cost model from a profile of single layers: measured times by tokens, requests and contexts.

The folder has the files of LLMServingSim's profiler: ``profile_meta.yaml`` (model, gpu, and optionally skew_fit and
engine_effective), and for each tensor-parallel degree N, as one of its ranks sees it, ``profile_dense_tpN.csv`` (layer,
tokens, time_us), ``profile_per_sequence_tpN.csv`` (layer, sequences, time_us) and ``profile_attention_tpN.csv``
(prefill_chunk, kv_prefill, n_decode, kv_decode, time_us); for a model with experts also ``profile_moe_tpN.csv``
(tokens, activated_experts, time_us). The files of one rank may lack ``_tp1``. A step is

    embedding + layers x (dense layers + attention) + final norm + head and sampler,

each at the step's number of tokens or requests, plus the all-reduces of tensor parallelism. The links are those of a
``config.json`` in the folder (link_bw in GB/s, link_latency in ns), as of LLMServingSim's clusters, or else usual ones.
Not included: scheduling (an asynchronous engine schedules a step while the previous one runs) and gaps between kernels
(a captured graph has almost none). expert_parallel.py has the steps of several engines that share experts.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import DTYPE_BYTES
from quire.protocol.model.model_config import ModelConfig
from quire.replay.costs.csv_table import read_measured, read_points, read_text
from quire.replay.costs.grid import Curve, Grid
from quire.replay.costs.link import Interconnect
from quire.replay.costs.models import find_model
from quire.replay.costs.sizes import expert_layers, num_experts_read
from quire.replay.recorded.decompress import find_file
from quire.replay.run.step_shape import StepShape

DENSE, PER_SEQUENCE, ATTENTION = "profile_dense.csv", "profile_per_sequence.csv", "profile_attention.csv"
EXPERTS = "profile_moe.csv"
_DENSE_FILE = re.compile(r"profile_dense(?:_tp(\d+))?\.csv")
DEFAULT_LINK = Interconnect(25e9, 1e-5)
"""The link of chips whose data sheet gives none."""

_ONCE = frozenset({"embedding", "final_layernorm"})
"""Parts that a model has once; all others are in each layer."""

_TWICE = frozenset({"layernorm"})
"""Parts that are in each layer twice: before attention and before the feed-forward network."""

_NEEDED = frozenset({"qkv_proj", "o_proj"})
_FEED_FORWARD = frozenset({"gate_up_proj", "down_proj"})
_UNLESS_EXPERTS = _FEED_FORWARD | {"act_fn"}
"""Parts of layers without experts."""

_TOP = 16_384
"""Number of tokens up to which times are tabulated."""


class LayerProfileCost:
    """The time of a step: a sum by tokens, a sum by requests, and attention from its grid."""

    kv_bytes = 0

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        name: str,
        captured: Sequence[int] = (),
        skew: float = 0.0,
        *,
        ranks: int = 1,
        link: Interconnect = DEFAULT_LINK,
        with_experts: bool = True,
    ) -> None:
        """
        Args:
            model: provides the number of layers.
            name: name of the chip.
            captured: batch sizes of captured graphs, ascending; a smaller step is padded to the next. May be empty.
            skew: weight of the longest context in the time of decodes with unequal contexts: 0 uses the mean context,
                1 the longest. The profile has equal contexts only.
            ranks: tensor-parallel degree.
            link: between ranks.
            with_experts: include experts, which this engine then has by itself.

        Raises:
            ConfigError: a table is missing or invalid; names file and line.
        """
        self._description = f"profile of {model.num_layers} layers on {name}, from {folder}"
        if ranks > 1:
            self._description += f", {ranks} ranks linked by {link.bandwidth / 1e9:g} GB/s"
        times = _token_times(folder, model, ranks, link)
        if with_experts:
            _add_experts(times, folder, model, ranks)
        self._by_tokens = _padded(times, captured)
        self._by_sequences = Curve(_sequence_times(folder, model, ranks, link), _TOP)
        self._attention = AttentionGrids(find_table(folder, ATTENTION, ranks), skew)
        self._layer_seconds = model.num_layers * 1e-6

    def seconds(self, step: StepShape) -> float:
        return self.seconds_at(step, step.num_tokens)

    def seconds_at(self, step: StepShape, num_tokens: int) -> float:
        """Return the seconds of a step that is padded to ``num_tokens``."""
        micros = self._by_tokens.at(num_tokens)
        micros += self._by_sequences.at(step.num_decodes + len(step.prefills))
        return micros * 1e-6 + self._attention.micros(step) * self._layer_seconds

    def describe(self) -> str:
        return f"table: {self._description}"


def is_layer_profile(folder: Path) -> bool:
    return bool(_degrees(folder))


def load_layer_profile(
    folder: Path, model: ModelConfig | None, ranks: int = 1, max_num_seqs: int | None = None
) -> LayerProfileCost:
    """Return the cost model of a profile; see ``read_profile``."""
    return LayerProfileCost(folder, **read_profile(folder, model, ranks, max_num_seqs))


def read_profile(folder: Path, model: ModelConfig | None, ranks: int, max_num_seqs: int | None) -> dict[str, Any]:
    """Return the arguments of LayerProfileCost that a profile determines.

    Args:
        model: None: the model named by ``profile_meta.yaml``.
        ranks: tensor-parallel degree.
        max_num_seqs: of the engine, which captures graphs of up to twice as many tokens; None: as when profiled.

    Raises:
        ConfigError: an invalid file, or an unknown model.
    """
    meta = _meta(folder)
    if model is None:
        if not isinstance(meta.get("model"), str):
            raise ConfigError(f"{folder}: profile_meta.yaml does not name the model: use table:DIR,CONFIG")
        model = find_model(meta["model"])
    most = max_num_seqs or _submapping(meta, "engine_effective").get("max_num_seqs", 256)
    captured = captured_sizes(min(2 * most, 512) if isinstance(most, int) else 512)
    fit = _submapping(meta, "skew_fit")
    skew = (_submapping(_submapping(fit, "per_tp"), ranks) or fit).get("alpha_default")
    skew = float(skew) if isinstance(skew, int | float) and 0 <= skew <= 1 else 0.0
    name = str(meta.get("gpu", folder.name))
    return {"model": model, "name": name, "captured": captured, "skew": skew, "ranks": ranks, "link": _link(folder)}


def find_table(folder: Path, name: str, ranks: int) -> Path:
    """Return the file of a table at a tensor-parallel degree.

    Raises:
        ConfigError: the profile has no such file.
    """
    path = find_file(folder, name.replace(".csv", f"_tp{ranks}.csv"))
    if path is None and ranks == 1:
        path = find_file(folder, name)
    if path is not None:
        return path
    degrees = _degrees(folder)
    text = f"{folder}: {name if ranks == 1 else name.replace('.csv', f'_tp{ranks}.csv')} not found"
    if degrees and ranks not in degrees:
        known = ", ".join(map(str, degrees))
        text += f": tensor_parallel_size must be a degree of the profile ({known}; got {ranks})"
    raise ConfigError(text)


def _degrees(folder: Path) -> list[int]:
    """Return the tensor-parallel degrees of which the folder has a profile."""
    names = [path.name for path in folder.glob("profile_dense*")]
    found = {int(match[1]) if match[1] else 1 for name in names if (match := _DENSE_FILE.match(name))}
    return sorted(found)


def _link(folder: Path) -> Interconnect:
    path = find_file(folder, "config.json")
    if path is None:
        return DEFAULT_LINK
    try:
        cluster = msgspec.json.decode(read_text(path), type=_Cluster)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
    if cluster.link_bw is None:
        return DEFAULT_LINK
    return Interconnect(cluster.link_bw * 1e9, cluster.link_latency * 1e-9)


class _Cluster(msgspec.Struct):
    """The fields that are read of a description of a cluster; all others are ignored, so it may be a model's, too."""

    link_bw: Annotated[float, msgspec.Meta(gt=0)] | None = None
    link_latency: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def _meta(folder: Path) -> dict[Any, Any]:
    path = find_file(folder, "profile_meta.yaml")
    try:
        meta = yaml.safe_load(read_text(path)) if path is not None else {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(meta, dict):
        raise ConfigError(f"{path}: must be a mapping")
    return meta


def _submapping(whole: dict[Any, Any], key: object) -> dict[Any, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


class AttentionGrids:
    """Microseconds of one layer's attention for decodes alone, prefills alone, and both in one batch.

    There are three grids, because kernels take another path if every query is one token, and interpolation between no
    decode and one is meaningless.
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
                raise ConfigError(f"{path}: no row for {kind}")
        self._decodes, self._prefills, self._mixed = Grid(decodes), Grid(prefills), Grid(mixed)

    def micros(self, step: StepShape) -> float:
        decodes, prefills = step.num_decodes, step.prefills
        if not prefills:
            return self._decode_micros(step) if decodes else 0.0
        if len(prefills) == 1:
            return self._decode_micros(step, *prefills[0])
        chunk, before = merge_prefills(prefills)
        together = self._prefills.at(chunk, before)
        apart = sum(self._prefills.at(*each) for each in prefills)
        saved = max(together - apart, 0.0)  # several short prompts have fewer pairs than one long one
        return self._decode_micros(step, chunk, before) - saved

    def _decode_micros(self, step: StepShape, chunk: float = 0, before: float = 0) -> float:
        """Return the time of the step's decodes with at most one prefill, weighted by ``skew``."""
        decodes = step.num_decodes
        if not decodes:
            return self._prefills.at(chunk, before)
        mean = step.decode_context / decodes
        grid, x = (self._mixed, (chunk, before, decodes)) if chunk else (self._decodes, (decodes,))
        if not self._skew or step.longest_decode <= mean:
            return grid.at(*x, mean)
        equal, longest = grid.at_both(x, mean, step.longest_decode)
        return equal + self._skew * max(longest - equal, 0.0)


def merge_prefills(prefills: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """Return (tokens, context) of the single prefill with as many (query, key) pairs as these together.

    The context is 0 if they have fewer pairs than one prompt of as many tokens.
    """
    tokens = sum(chunk for chunk, _ in prefills)
    pairs = sum(chunk * (before + chunk / 2) for chunk, before in prefills)
    return tokens, max(pairs / tokens - tokens / 2, 0.0)


def captured_sizes(most_tokens: int) -> list[int]:
    """Return the batch sizes of captured graphs as in vLLM: 1, 2, 4, multiples of 8 to 256, then of 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, most_tokens + 1, 16)]
    return [size for size in sizes if size <= most_tokens]


def _padded(micros: Mapping[int, float], captured: Sequence[int]) -> Curve:
    """Return the curve by tokens; a step that fits a captured graph takes as long as the graph."""
    curve = Curve(micros, _TOP)
    below = 0
    for size in captured:
        for tokens in range(below + 1, size):
            curve.values[tokens] = curve.values[size]
        below = size
    return curve


def _token_times(folder: Path, model: ModelConfig, ranks: int, link: Interconnect) -> dict[int, float]:
    """Return microseconds by tokens of all dense layers and all-reduces of the model."""
    without = model.num_layers - expert_layers(model)
    needed = _NEEDED | (_FEED_FORWARD if without else frozenset())
    dense = _layer_points(find_table(folder, DENSE, ranks), "tokens", needed)
    sums = _sum(dense, {name: _times(name, model.num_layers, without) for name in dense})
    if ranks > 1:
        reduces = 2 * model.num_layers + 1  # after attention and feed-forward network of each layer; the embedding
        token_bytes = model.hidden_size * DTYPE_BYTES[model.dtype]
        for tokens in sums:
            sums[tokens] += 1e6 * reduces * link.all_reduce(tokens * token_bytes, ranks)
    return sums


def _add_experts(sums: dict[int, float], folder: Path, model: ModelConfig, ranks: int) -> None:
    """Add the microseconds of the model's experts to those by tokens."""
    if layers := expert_layers(model):
        experts = read_experts(folder, ranks)
        for tokens in sums:
            sums[tokens] += layers * experts.at(tokens, num_experts_read(model, tokens))


def read_experts(folder: Path, ranks: int) -> Grid:
    """Return microseconds of one layer's experts by (tokens, number of experts that some token chooses)."""
    return Grid(read_points(find_table(folder, EXPERTS, ranks), ("tokens", "activated_experts"), "time_us"))


def _sequence_times(folder: Path, model: ModelConfig, ranks: int, link: Interconnect) -> dict[int, float]:
    """Return microseconds by requests of the head, which gathers the logits of all ranks, and the sampler."""
    sequences = _layer_points(find_table(folder, PER_SEQUENCE, ranks), "sequences", frozenset({"lm_head"}))
    sums = _sum(sequences, dict.fromkeys(sequences, 1))
    logits_bytes = model.vocab_size / ranks * DTYPE_BYTES[model.dtype]
    return {number: micros + 1e6 * link.all_gather(number * logits_bytes, ranks) for number, micros in sums.items()}


def _times(name: str, num_layers: int, num_without_experts: int) -> int:
    if name in _ONCE:
        return 1
    layers = num_without_experts if name in _UNLESS_EXPERTS else num_layers
    return 2 * layers if name in _TWICE else layers


def _layer_points(path: Path, key: str, needed: frozenset[str]) -> dict[str, dict[int, float]]:
    """Return microseconds by layer name and number of tokens or sequences."""
    points: dict[str, dict[int, float]] = {}
    for line, (layer, number), micros in read_measured(path, ("layer", key), "time_us"):
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"{path}:{line}: {key} must be a whole number of at least 1 (got {number!r})")
        points.setdefault(layer, {})[int(number)] = micros
    if missing := sorted(needed - points.keys()):
        raise ConfigError(f"{path}: no row for layer {', '.join(missing)}")
    return points


def _sum(layers: Mapping[str, Mapping[int, float]], times: Mapping[str, int]) -> dict[int, float]:
    """Return the total of all layers, each multiplied by ``times``, at every measured number."""
    numbers = sorted({number for points in layers.values() for number in points})
    curves = {name: Curve(points, numbers[-1]) for name, points in layers.items()}
    return {number: sum(times[name] * curve.at(number) for name, curve in curves.items()) for number in numbers}
