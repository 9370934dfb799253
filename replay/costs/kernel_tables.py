"""A cost model from tables of measured kernels: matrix products, attention, all-reduces.

The tables are aiconfigurator's CSV files, whose names begin with ``gemm``, ``context_attention``,
``generation_attention`` and ``custom_allreduce`` (the last only for several ranks), with latencies in milliseconds.
Norms, rotary embeddings and sampling are added as bytes over the chip's bandwidth. Gaps between kernels, scheduling and
the network are not included.
"""

from collections.abc import Sequence
from pathlib import Path

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig
from quire.replay.costs.chips import CHIPS, Chip
from quire.replay.costs.csv_table import read_measured, read_points
from quire.replay.costs.grid import Curve, Grid
from quire.replay.costs.roofline import ModelOnChips
from quire.replay.run.step_shape import StepShape

_USE_ROOFLINE = "use a roofline instead, such as --cost roofline:config.json,h200"
_TOP = 16_384
_HEAD_TOP = 512
"""Numbers of tokens, and of rows of the output projection, up to which times are tabulated."""


class KernelTableCost(ModelOnChips):
    """The time of a dense model as the sum of its kernels, interpolated between measured shapes.

    The attention of a prefill after cached context takes the time of the whole prompt minus that of the cached part,
    because the numbers of products are equal.
    """

    def __init__(self, folder: Path, model: ModelConfig, tensor_parallel_size: int = 1, chip: Chip | None = None):
        """
        Args:
            chip: chip on which the tables were measured; None: an H200.

        Raises:
            ConfigError: a table is missing or invalid or lacks the model's heads; names file and line.
        """
        super().__init__(model, chip or CHIPS["h200"], tensor_parallel_size)
        if model.moe is not None:
            raise ConfigError(f"{folder}: the tables have no mixture-of-experts models, {_USE_ROOFLINE}")
        if len(model.all_kv_shapes) > 1:
            raise ConfigError(f"{folder}: the tables need layers with the same KV heads, {_USE_ROOFLINE}")
        if model.head_dim != 128:
            raise ConfigError(f"{folder}: head_dim must be 128 (got {model.head_dim}), {_USE_ROOFLINE}")
        self._folder = folder
        self._by_tokens = self._token_curve(folder)
        self._by_samples = self._head_curve(folder)
        heads = (model.num_heads // self._ranks, max(model.num_kv_heads // self._ranks, 1))
        self._decodes = _decode_grid(_file(folder, "generation_attention"), heads)
        self._prefill = _prefill_curve(_file(folder, "context_attention"), heads)
        self._longest = max(self._prefill)
        self._prefill_curve = Curve(self._prefill, self._longest)

    def describe(self) -> str:
        return (
            f"table: kernels of {self._model.architecture} with {self._model.num_layers} layers {self._on}, "
            f"from {self._folder} (without gaps between kernels and scheduling)"
        )

    def seconds(self, step: StepShape) -> float:
        millis = 0.0
        if step.num_decodes:
            millis = self._decodes.at(step.num_decodes, step.decode_context / step.num_decodes)
        if step.prefills:
            least = self._prefill_curve.values[1]
            millis += least + sum(
                max(self._prompt_millis(k + n) - self._prompt_millis(k), 0.0) for n, k in step.prefills
            )
        samples = max(step.num_samples, 1)
        return (
            self._by_tokens.at(step.num_tokens) + self._by_samples.at(samples) + millis * self._model.num_layers
        ) * 1e-3

    def _prompt_millis(self, tokens: int) -> float:
        """Return the milliseconds of one prompt's attention, less the minimum time of a kernel.

        Beyond the longest measured prompt the time is quadratic.
        """
        curve = self._prefill_curve
        if tokens <= self._longest:
            return curve.values[tokens] - curve.values[1]
        return (curve.values[self._longest] - curve.values[1]) * (tokens / self._longest) ** 2

    def _token_curve(self, folder: Path) -> Curve:
        """Return the milliseconds of all layers without attention, by tokens."""
        model, ranks = self._model, self._ranks
        queries, keys = model.num_heads * model.head_dim // ranks, model.num_kv_heads * model.head_dim // ranks
        keys = max(keys, model.head_dim)
        inner = model.intermediate_size // ranks
        products = [
            (queries + 2 * keys, model.hidden_size),
            (model.hidden_size, queries),
            (2 * inner, model.hidden_size),
            (model.hidden_size, inner),
        ]
        self._grid, self._rows = _gemm_grid(_file(folder, "gemm"))
        once = {m: sum(self._grid.at(n, k, m) for n, k in products) for m in self._rows}
        curve = Curve({m: millis * model.num_layers for m, millis in once.items()}, _TOP)
        passed = 8 * model.hidden_size + 3 * inner + 2 * queries + 2 * keys
        streamed = passed * model.num_layers * self._bytes / (self._chip.bandwidth * self._chip.memory_efficiency)
        exchange = _exchange(_file(folder, "custom_allreduce"), ranks) if ranks > 1 else None
        for tokens in range(1, len(curve.values)):
            curve.values[tokens] += tokens * streamed * 1e3
            if exchange is not None:
                curve.values[tokens] += 2 * model.num_layers * exchange.at(tokens * model.hidden_size)
        return curve

    def _head_curve(self, folder: Path) -> Curve:
        columns = self._model.vocab_size // self._ranks
        rows = [m for m in self._rows if m <= _HEAD_TOP]
        return Curve({m: self._grid.at(columns, self._model.hidden_size, m) for m in rows}, _HEAD_TOP)


def _exchange(path: Path, num_ranks: int) -> Grid:
    """Return the milliseconds of an all-reduce by elements (``message_size`` counts 16-bit elements)."""
    points: dict[tuple[int, ...], float] = {}
    found: set[str] = set()
    for _, (ranks, size, backend), millis in read_measured(path, ("num_gpus", "message_size", "backend"), "latency"):
        found.add(ranks)
        if ranks == str(num_ranks) and not backend.endswith("eager"):  # as in a captured step
            points[int(size),] = millis
    if not points:
        raise ConfigError(f"{path}: no rows for {num_ranks} ranks; the table has {', '.join(sorted(found))}")
    return Grid(points)


def is_kernel_tables(folder: Path) -> bool:
    return _find(folder, "gemm") is not None


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in sorted(folder.glob(f"{name}*.csv*"))), None)


def _file(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise ConfigError(f"{folder}: {name}*.csv not found")
    return path


def _gemm_grid(path: Path) -> tuple[Grid, Sequence[int]]:
    """Return milliseconds by (columns, inner size, rows), and the measured numbers of rows."""
    points = read_points(path, ("n", "k", "m"), "latency")
    return Grid(points), sorted({m for _, _, m in points})


def _decode_grid(path: Path, heads: tuple[int, int]) -> Grid:
    points = read_points(path, ("num_heads", "num_key_value_heads", "batch_size", "step"), "latency")
    # ``step`` counts the tokens before the new one.
    return Grid({(p[2], p[3] + 1): millis for p, millis in _select_heads(path, points, heads).items()})


def _prefill_curve(path: Path, heads: tuple[int, int]) -> dict[int, float]:
    points = read_points(path, ("num_heads", "num_key_value_heads", "batch_size", "isl"), "latency")
    found = {p[3]: millis for p, millis in _select_heads(path, points, heads).items() if p[2] == 1}
    if not found:
        raise ConfigError(f"{path}: no rows of batch_size 1 for {heads[0]} heads")
    return found


def _select_heads(
    path: Path, points: dict[tuple[int, ...], float], heads: tuple[int, int]
) -> dict[tuple[int, ...], float]:
    found = {point: millis for point, millis in points.items() if point[:2] == heads}
    if not found:
        known = sorted({point[:2] for point in points})
        raise ConfigError(
            f"{path}: no rows for {heads[0]} heads over {heads[1]} KV heads; "
            f"the table has {', '.join(f'{a}/{b}' for a, b in known)}"
        )
    return found
