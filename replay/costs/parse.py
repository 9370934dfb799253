"""Parses ``--cost`` to a cost model."""

from pathlib import Path

from quire.protocol.errors import ConfigError, did_you_mean
from quire.protocol.model.model_config import ModelConfig
from quire.replay.costs.chips import find_chip
from quire.replay.costs.cost import ConstantCost, CostModel
from quire.replay.costs.expert_parallel import ExpertParallelCost
from quire.replay.costs.fitted import fit
from quire.replay.costs.kernel_tables import KernelTableCost, is_kernel_tables
from quire.replay.costs.layers import is_layer_profile, load_layer_profile
from quire.replay.costs.models import find_model
from quire.replay.costs.roofline import Roofline
from quire.replay.formats.arrivals import positive
from quire.replay.workload.workload import Workload

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_CHIP = "h200"
KINDS = {
    "constant": "constant:MS",
    "roofline": "roofline:CONFIG,CHIP",
    "table": "table:DIR[,CONFIG]",
    "fitted": "fitted:FILE",
}


def parse_cost(
    spec: str,
    *,
    tensor_parallel_size: int = 1,
    model: ModelConfig | None = None,
    expert_parallel: int = 0,
    max_num_seqs: int | None = None,
) -> CostModel:
    """Return the cost model of ``spec``.

    ``constant:MS``, ``roofline:CONFIG,CHIP``, ``table:DIR[,CONFIG]`` or ``fitted:FILE``. CONFIG is a config.json, a
    folder with one, or a model's name; CHIP a built-in name or a file (chips.py); DIR has kernel tables or a layer
    profile.

    Args:
        tensor_parallel_size: number of ranks of the machine.
        model: replaces a missing CONFIG, except for a layer profile, which names its own model.
        expert_parallel: number of engines that share the experts; 0: each has them all.
        max_num_seqs: of an engine, for a layer profile (``layers.read_profile``).

    Raises:
        ConfigError: an invalid spec; names the unknown part and the nearest known name.
    """
    kind, colon, rest = spec.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"cost {spec!r}: unknown kind{did_you_mean(kind, KINDS)}; known: {', '.join(KINDS.values())}")
    if not colon or not rest:
        raise ConfigError(f"cost {spec!r}: must be {KINDS[kind]}")
    if expert_parallel and kind != "table":
        raise ConfigError(f"cost {spec!r}: enable_expert_parallel needs a layer profile: table:DIR")
    match kind:
        case "constant":
            return ConstantCost(positive(rest, f"cost {spec!r}: milliseconds"))
        case "roofline":
            return _roofline(spec, rest, tensor_parallel_size, model)
        case "table":
            return _table(rest, tensor_parallel_size, model, expert_parallel, max_num_seqs)
        case _:
            return fit(Path(rest).expanduser())


def config_of(spec: str) -> str:
    """Return the CONFIG part of ``spec``, or ""."""
    kind, _, rest = spec.partition(":")
    if kind == "roofline":
        return rest.rpartition(",")[0]
    return _folder_and_config(rest)[1] if kind == "table" else ""


def default_cost(workload: Workload, *, tensor_parallel_size: int = 1, model: ModelConfig | None = None) -> CostModel:
    """Return the default cost model: a fit to the trace's own timed steps, or a roofline of an H200.

    Args:
        model: the model on the H200; None: an 8B model.

    Raises:
        ConfigError: the trace has too few timed steps.
    """
    if workload.format == "quire":
        return fit(Path(workload.source))
    return Roofline(model or find_model(DEFAULT_MODEL), find_chip(DEFAULT_CHIP), tensor_parallel_size)


def _roofline(spec: str, rest: str, ranks: int, model: ModelConfig | None) -> CostModel:
    config, comma, chip = rest.rpartition(",")
    if not comma and model is None:
        raise ConfigError(f"cost {spec!r}: must be {KINDS['roofline']}")
    shape = find_model(config) if config or model is None else model
    return Roofline(shape, find_chip(chip), ranks)


def _table(
    rest: str, ranks: int, model: ModelConfig | None, expert_parallel: int, max_num_seqs: int | None
) -> CostModel:
    folder, named = _folder_and_config(rest)
    shape = find_model(named) if named else None
    if is_layer_profile(folder):  # a layer profile names its own model
        if expert_parallel:
            return ExpertParallelCost(folder, shape, ranks, expert_parallel, max_num_seqs)
        return load_layer_profile(folder, shape, ranks, max_num_seqs)
    if expert_parallel:
        raise ConfigError(f"{folder}: enable_expert_parallel needs a layer profile (profile_dense_tp1.csv, ...)")
    if is_kernel_tables(folder):
        return KernelTableCost(folder, shape or model or find_model(DEFAULT_MODEL), ranks)
    raise ConfigError(f"{folder}: neither kernel tables (gemm*.csv, ...) nor a layer profile (profile_*.csv)")


def _folder_and_config(rest: str) -> tuple[Path, str]:
    """Split ``DIR[,CONFIG]``; the folder's name may itself contain a comma."""
    if not Path(rest).expanduser().is_dir() and "," in rest:
        rest, _, config = rest.rpartition(",")
    else:
        config = ""
    folder = Path(rest).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder}: folder not found")
    return folder, config
