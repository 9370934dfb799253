"""Tries whether a class of transformers computes the same on several ranks, before any weight is loaded.

A plan for tensor parallelism is a promise of the class, which its code may not keep: it may use the whole number of
heads, or cut joined projections in the wrong place. So the first layer of each kind runs with numbers, once whole and
once as each rank, and all results are compared. The module runs as a helper process, as ``measure.py``.
"""

import re
from copy import deepcopy
from typing import Any
from zlib import crc32

import msgspec
import torch

from quire.protocol.errors import MAX_SHOWN
from quire.protocol.model.measured_config import DivisionQuestion, MeasuredConfig, Refused
from quire.protocol.process.helper import Answer, serve
from quire.protocol.process.log import one_line
from quire.worker_proc.models.transformers.attention import Call, connect, register
from quire.worker_proc.models.transformers.build import (
    Unservable,
    allocate,
    base_of,
    be_quiet,
    build_module,
    read_settings,
    settings_of,
)
from quire.worker_proc.models.transformers.divide import Division, divide
from quire.worker_proc.models.transformers.measure import EXTRA_BYTES
from quire.worker_proc.models.transformers.watch import pattern_of

TRIED = "quire_tried"
TOKENS = 2
_TOLERANCE = 1e-3
"""Of the largest result of a module. Sums in float32 differ by 1e-5 of it."""

_PLACES = 2**16


class _Ranks:
    """``TensorParallel`` of ranks that run one after the other, beginning with one rank alone.

    A rank continues with the results of the one that ran alone, and its own are added to those of the others.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.calls = 0, 1, 0
        self._alone: list[torch.Tensor] = []
        self._together: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._next(x, ...)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[1]
        return self._next(x, (slice(None), slice(self.rank * width, (self.rank + 1) * width)))

    def close(self) -> None:
        pass

    def become(self, rank: int, size: int) -> None:
        self.rank, self.size, self.calls = rank, size, 0

    def agree(self) -> bool:
        """Whether all results are those of one rank alone."""
        return self.calls == len(self._alone) and all(map(_close, self._together, self._alone))

    def _next(self, x: torch.Tensor, place: Any) -> torch.Tensor:
        if self.size == 1:
            self._alone.append(x)
            self._together.append(torch.zeros_like(x))
        else:
            self._together[self.calls][place] += x
        self.calls += 1
        return self._alone[self.calls - 1].clone()


def divided(measured: MeasuredConfig, ranks: int) -> MeasuredConfig:
    """Return the layout with the heads that each of several ranks has.

    Raises:
        Unservable: the class has no plan that Quire can serve, or computes something else with it.
    """
    register(TRIED)
    config = read_settings(measured.settings)
    config._experts_implementation = "eager"  # a loop: other ways want weights with memory of their own
    model = build_module(config, torch.float32, TRIED)
    kinds = _keep_first_layers(model, measured)
    exchange, found = _Ranks(), []
    for size in (1, ranks):
        for rank in range(size):
            exchange.become(rank, size)
            try:
                found.append(_run(deepcopy(model), exchange))
            except Unservable:
                raise
            except Exception as error:  # any code of the library
                raise Unservable(_reason(measured, ranks, error)) from None
    (alone, whole), (_, heads) = found[0], found[1]
    same = all(_close(hidden, alone) and own == heads for hidden, own in found[1:]) and exchange.agree()
    if not same or [widths for *_, widths in heads] != [widths for *_, widths in whole]:
        raise Unservable(f"computes something else on {ranks} ranks, by its plan (tp_plan), than on one")
    own = [
        msgspec.structs.replace(layer, num_heads=heads[kind][0], num_kv_heads=heads[kind][1])
        for layer, kind in zip(measured.layers, kinds, strict=True)
    ]
    return msgspec.structs.replace(measured, ranks=ranks, own_layers=own)


def _reason(measured: MeasuredConfig, ranks: int, error: Exception) -> str:
    """Return why a rank's part of a model does not run: mostly the numbers of heads."""
    for layer in measured.layers:
        if layer.num_heads % ranks or layer.num_kv_heads % ranks:
            heads = f"{layer.num_heads} heads and {layer.num_kv_heads} KV heads in {layer.module}"
            return f"has {heads}, which {ranks} ranks cannot share equally"
    text = one_line(" ".join(str(error).split()))[:MAX_SHOWN]
    return f"does not run on a part of its heads and widths, which its plan for tensor parallelism gives a rank: {text}"


def _keep_first_layers(model: Any, measured: MeasuredConfig) -> list[int]:
    """Keep the first layer of each kind; return for each layer the call of attention by the kept one of its kind.

    If layers read keys of others, all layers before the last kept one stay too.
    """
    first: dict[Any, int] = {}
    kinds: list[int] = []
    places: list[tuple[str, int]] = []
    for index, layer in enumerate(measured.layers):
        match = re.match(r"(.+?)\.(\d+)\.", layer.module)
        if match is None:
            raise Unservable(f"attends in {layer.module}, which is in no list of layers")
        places.append((match[1], int(match[2])))
        own = msgspec.structs.replace(layer, module=pattern_of(layer.module), source=0)
        weights = model.get_submodule(match[1])[places[index][1]].named_parameters()
        shapes = tuple((name, tuple(weight.shape)) for name, weight in weights)
        kinds.append(first.setdefault((own, layer.source == index, shapes), index))
    reads = any(layer.source != index for index, layer in enumerate(measured.layers))
    kept = set(places[: max(kinds) + 1] if reads else (places[index] for index in first.values()))
    for path, number in sorted(set(places) - kept, reverse=True):
        del model.get_submodule(path)[number]
    calls = [index for index, place in enumerate(places) if place in kept]
    return [calls.index(kind) for kind in kinds]


_Heads = tuple[int, int, tuple[int, int]]
"""Heads, KV heads, and widths of a head's key and value."""


@torch.no_grad()
def _run(model: Any, exchange: _Ranks) -> tuple[torch.Tensor, list[_Heads]]:
    """Return the hidden states of a few tokens on one rank, and the heads of its layers."""
    division = divide(model, exchange)
    allocate(model, "cpu", data=False)
    _fill(model, division)
    division.install(model)
    heads: list[_Heads] = []

    def attend(call: Call) -> torch.Tensor:
        heads.append((call.query.shape[1], call.key.shape[1], (call.key.shape[3], call.value.shape[3])))
        return _attention(call)

    for module in model.modules():
        connect(module, attend)
    tokens = torch.arange(TOKENS)[None]
    base, mask = base_of(model), torch.ones_like(tokens)
    hidden: torch.Tensor = base(input_ids=tokens, position_ids=tokens, attention_mask=mask, **settings_of(base))[0]
    return hidden, heads


def _attention(call: Call) -> torch.Tensor:
    """Compute causal attention, by which each head and its sink has results of its own."""
    query, groups, settings = call.query, call.query.shape[1] // call.key.shape[1], call.settings
    key, value = (each.repeat_interleave(groups, 1) for each in (call.key, call.value))
    scale = settings.get("scaling")
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), -torch.inf)
    out: torch.Tensor = scores.softmax(-1) @ value
    sinks = settings.get("s_aux")
    return (out if sinks is None else out * sinks.view(1, -1, 1, 1)).transpose(1, 2).contiguous()


def _fill(model: Any, division: Division) -> None:
    """Give each weight its part of numbers that depend on its path.

    They take no memory for each weight: its rows are a list of random numbers from places 7 apart on, and all experts
    of a layer have the same.
    """
    weights = dict(model.named_parameters())
    shapes = {path: tuple(weight.shape) for path, weight in weights.items()}
    shapes |= {path: part.shape for path, part in division.parts.items()}
    longest = max(max(shape, default=1) for shape in shapes.values())
    numbers = torch.randn(_PLACES + 8 * longest, generator=torch.Generator().manual_seed(0))
    for path, weight in weights.items():
        shape, part = shapes[path], division.parts.get(path)
        strides = ([0] * len(shape) + [7, 1])[2:]
        start = crc32(path.encode()) % _PLACES
        scaled = numbers[start : start + 8 * max(shape, default=1)] / (shape[-1] ** 0.5 if len(shape) > 1 else 1.0)
        whole = scaled.as_strided(shape, strides)
        if part is not None:
            whole = part.of(whole[:1] if len(shape) > 2 else whole)
        weight.data = whole.expand(weight.shape)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


def _prepare(hello: bytes) -> tuple[bytes, Answer | None]:
    import transformers

    return transformers.__version__.encode(), answer


def answer(question: bytes) -> bytes:
    """Return the layout of a ``DivisionQuestion`` for its ranks, or why there is none."""
    asked = msgspec.msgpack.decode(question, type=DivisionQuestion)
    found: MeasuredConfig | Refused
    try:
        be_quiet()
        found = divided(asked.measured, asked.ranks)
    except Unservable as reason:
        found = Refused(str(reason))
    return msgspec.msgpack.encode(found)


if __name__ == "__main__":
    serve(_prepare, EXTRA_BYTES)
