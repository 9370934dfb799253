"""Measures what a class of transformers computes, by one forward pass over a few tokens without data.

Every call of the attention function is recorded: heads, widths, scale, window, soft cap, sinks, and whose keys it
reads. So no family has code here, and a class that does anything else is refused with the reason. The module runs as a
helper process (``protocol/process/helper.py``) with limits of time and memory, because a config may ask for any model.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from quire.protocol.errors import MAX_SHOWN, printable
from quire.protocol.model.measured_config import MeasuredConfig, MeasuredLayer, Refused
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
from quire.worker_proc.models.transformers.head import Head
from quire.worker_proc.models.transformers.measure_states import Arguments, Watched, measured_states
from quire.worker_proc.models.transformers.watch import Functions, pattern_of, replaceable, watch

MEASURED = "quire_measured"
"""Name of the attention function while measuring. Unlike ``SERVED`` it has a mask function, whose masks say which
tokens a layer sees."""

TOKENS = 23  # as no dimension of a model
EXTRA_BYTES = 8 * 2**30
"""Memory for the modules of a model; weights have none on ``meta``."""
MOST_POSITIONS = 2**22
"""Positions up to which windows are looked for."""

_HARMLESS = {"dropout", "is_causal", "position_ids", "scaling", "sliding_window", "softcap", "s_aux", "use_cache"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "cache", "past_key_values", "cache_position"}
_HARMLESS |= {"position_embeddings", "deterministic", "training", "logits_to_keep", "target_dtype"}
"""Keyword arguments of attention that are measured, or that change nothing without a cache and training."""


def measure(settings: str) -> MeasuredConfig:
    """Measure the class and settings of a ``config.json``, by its text.

    Raises:
        Unservable: the model computes something that Quire's attention or cache does not.
    """
    import transformers

    config = read_settings(settings)
    text, named = config.get_text_config(), config.architectures
    kept = _Kept.of(text)  # first, because classes with layers of other kinds may fail in other ways
    with Functions(TOKENS) as functions:
        model, calls, stateful, hidden, logits = _run(config)
    layers_to_replace = replaceable(model)  # before the weights are looked at here, and modules called again
    products = _products(model, layers_to_replace)
    if named and type(model).__name__ != named[0]:
        raise Unservable(f"is a {printable(named[0])}, and only its {type(model).__name__} can be served")
    if len({call.module for call in calls}) < len(calls):
        raise Unservable("calls attention twice in one layer")
    positions = _num_positions(text)
    paths = {module: path for path, module in model.named_modules()}
    layers: list[MeasuredLayer] = []
    owners: dict[int, int] = {}
    for index, call in enumerate(calls):
        source = owners.setdefault(call.key.untyped_storage()._cdata, index)
        layers.append(_layer(call, paths[call.module], source, positions))
        read, own = layers[source], layers[index]
        if (read.kv_shape, read.window) != (own.kv_shape, own.window):
            raise Unservable(f"reads keys of {read.module} in {own.module} with another shape or window")
    _check_windows(kept.windows, layers, positions)
    _check_positions(model, functions.counting, {call.module for call in calls})
    if len(calls) != kept.num_attending:
        raise Unservable(f"has {kept.num_attending} layers and {len(calls)} calls of attention")
    states = measured_states(model, stateful, {layer.module for layer in layers}, kept.states) if kept.states else []
    embedding = model.get_input_embeddings()
    if embedding.weight.shape[0] < logits.shape[1]:
        raise Unservable(f"has {logits.shape[1]} logits, and embeddings of {embedding.weight.shape[0]} tokens only")
    head = model.get_output_embeddings()
    linears = (part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head)
    return MeasuredConfig(
        class_name=type(model).__name__,
        version=transformers.__version__,
        settings=settings,
        vocab_size=logits.shape[1],
        hidden_size=hidden.shape[1],
        intermediate_size=max((part.out_features for part in linears), default=4 * hidden.shape[1]),
        max_position=positions,
        layers=layers,
        replaceable=layers_to_replace,
        linears={path: (part.out_features, part.in_features) for path, part in products.items() if _in_layer(path)},
        outside=_outside(model, products),
        states=states,
    )


def _products(model: Any, patterns: list[list[str]]) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that Quire may compute, without the head, by their paths."""
    found = {pattern for group in patterns for pattern in group}
    linears = ((path, part) for path, part in model.named_modules() if isinstance(part, torch.nn.Linear))
    head = model.get_output_embeddings()
    return {path: part for path, part in linears if part is not head and pattern_of(path) in found}


def _in_layer(path: str) -> bool:
    """Whether a path has one number, that of its layer: an expert's has another one."""
    return pattern_of(path).count("*") == 1


def _outside(model: Any, products: dict[str, torch.nn.Linear]) -> str:
    """Return ``MeasuredConfig.outside``: most weights are joined experts, for example."""
    tables = (part for part in model.modules() if isinstance(part, torch.nn.Embedding))
    inside = {id(part.weight) for part in (*products.values(), *tables, model.get_output_embeddings())}
    others = {path: weight.numel() for path, weight in model.named_parameters() if id(weight) not in inside}
    few = sum(others.values()) <= sum(part.weight.numel() for part in products.values())
    return "" if few else max(others, key=lambda path: others[path])


_Run = tuple[Any, list[Call], dict[str, list[Arguments]], torch.Tensor, torch.Tensor]


def _run(config: Any) -> _Run:
    """Return the model, its attention calls, those of modules that take a cache, its hidden states and their logits.

    On ``meta``, which needs no memory, in the only dtype in which torch's product of all experts runs there. Code that
    reads values, such as a loop over chosen experts, does not, and then the model is run on the CPU, with weights
    that are one zero each.
    """
    _register()
    try:
        return _run_on(build_module(config, torch.bfloat16, MEASURED), "meta")
    except (NotImplementedError, RuntimeError, ValueError):
        model = build_module(config, torch.float32, MEASURED)
        allocate(model, "cpu", data=False)
        return _run_on(model, "cpu")


def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    register(MEASURED)
    ALL_MASK_ATTENTION_FUNCTIONS.register(MEASURED, _mask)


def _mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any, **_: Any) -> torch.Tensor:
    """Return a mask that remembers what it hides; its values are not read."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.quire_function = mask_function  # type: ignore[attr-defined]
    return mask


@torch.no_grad()  # not inference mode, in which tensors have no versions
def _run_on(model: Any, device: str) -> _Run:
    calls: list[Call] = []  # with their tensors, by which shared keys are recognised

    def record(call: Call) -> torch.Tensor:
        calls.append(call)
        return call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[3])

    for module in model.modules():
        connect(module, record)
    watch(model)
    watched = Watched(model)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(TOKENS, device=device)[None]
    # A mask of ones keeps transformers from looking for packed sequences in the positions' values. Its own values are
    # read where layers have states, so it is never on ``meta``.
    base, mask = base_of(model), torch.ones(1, TOKENS, dtype=torch.int64)
    hidden = base(input_ids=tokens, position_ids=positions, attention_mask=mask, **settings_of(base))[0]
    watched.end()
    if not calls:
        raise Unservable("does not call attention")
    head = Head(model)
    logits = head(hidden[0])
    if head.calls != 1 or logits.shape[0] != TOKENS:
        raise Unservable("has a head that does not take the hidden states of its base model")
    return model, calls, watched.calls, hidden[0], logits


def _layer(call: Call, path: str, source: int, positions: int) -> MeasuredLayer:
    query, key, value, settings = call.query, call.key, call.value, call.settings
    if not query.shape[:1] == key.shape[:1] == (1,) or {t.shape[2] for t in (query, key, value)} != {TOKENS}:
        raise Unservable(f"attends in {path} to other tokens than those of the step")
    heads = [tensor.shape[1] for tensor in (query, key, value)]
    if heads[0] % heads[1] or heads[1] != heads[2]:
        raise Unservable(f"has {heads[0]} heads of queries, {heads[1]} of keys and {heads[2]} of values in {path}")
    further = sorted(name for name, found in settings.items() if found is not None and name not in _HARMLESS)
    if further:
        raise Unservable(f"passes {further[0]} to attention in {path}, which Quire's attention does not read")
    scale = settings.get("scaling")
    return MeasuredLayer(
        module=path,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_width=key.shape[3],
        value_width=value.shape[3],
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        source=source,
        window=_window(call, path, positions),
        soft_cap=float(settings.get("softcap") or 0.0),
        sinks=settings.get("s_aux") is not None,
    )


def _window(call: Call, path: str, positions: int) -> int:
    """Return the tokens that a token sees, itself included; 0: all before it.

    The mask decides, as for transformers' own functions, of which few read ``sliding_window``.
    """
    told = int(call.settings.get("sliding_window") or 0)
    if call.mask is None:
        causal = call.settings.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise Unservable(f"attends in {path} to later tokens: it is not causal")
        return told
    known: int | None = getattr(call.mask, "quire_window", None)
    if known is not None:  # layers share masks, and a long context takes a tenth of a second
        return known
    sees = getattr(call.mask, "quire_function", None)
    if sees is None:
        raise Unservable(f"adds a mask or a bias of its own to the scores of {path}")
    last = min(positions, MOST_POSITIONS) - 1
    keys = torch.arange(last + 1)
    counts = []
    for at in (last, last // 2, last // 3):
        try:
            seen = torch.as_tensor(sees(torch.tensor(0), torch.tensor(0), torch.tensor(at), keys)).expand(len(keys))
        except (RuntimeError, NotImplementedError, IndexError):
            raise Unservable(f"has a mask of its own in {path}, such as chunked attention") from None
        counts.append(int(seen.sum()))
        if seen[at + 1 :].any():
            raise Unservable(f"attends in {path} to later tokens: it is not causal")
        if not seen[at + 1 - counts[-1] : at + 1].all():
            raise Unservable(f"attends in {path} to other tokens than the last ones up to its own")
    widest = counts[0]
    if counts[1:] != [min(widest, at + 1) for at in (last // 2, last // 3)]:
        raise Unservable(f"attends in {path} to windows of unequal lengths, as chunked attention does")
    call.mask.quire_window = 0 if widest == last + 1 else widest  # type: ignore[attr-defined]
    return int(call.mask.quire_window)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What transformers' own cache keeps.

    Attributes:
        num_attending: number of layers that attend.
        windows: tokens that it keeps for each of them; 0: all.
        states: number, kind and number of states of each layer with a recurrent state.
    """

    num_attending: int
    windows: list[int]
    states: list[tuple[int, str, int]]

    @classmethod
    def of(cls, text: Any) -> "_Kept":
        """Raise Unservable for layers for which it keeps something else than keys, values and such states."""
        from transformers import DynamicCache
        from transformers.cache_utils import (
            DummyLayer,
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionAndSlidingWindowAttentionLayer,
            LinearAttentionLayer,
        )

        attending = DynamicLayer, DynamicSlidingWindowLayer
        both = LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer
        kinds = list(getattr(text, "layer_types", None) or [])
        layers = DynamicCache(config=text).layers
        states = []
        for index, layer in enumerate(layers):
            kind = kinds[index] if index < len(kinds) else type(layer).__name__
            if isinstance(layer, LinearAttentionLayer) and type(layer) in (LinearAttentionLayer, *both):
                states.append((index, kind, layer.number_of_states))
            elif type(layer) not in (*attending, DummyLayer):
                raise Unservable(f"has layers of kind {kind}, whose state Quire does not keep")
        own = [layer for layer in layers if type(layer) in (*attending, *both)]
        # Without states a layer that keeps nothing reads another one's keys; with them it may have no attention.
        attend = own if states else layers
        return cls(len(attend), [getattr(layer, "sliding_window", None) or 0 for layer in attend], states)


def _check_windows(windows: list[int], layers: list[MeasuredLayer], positions: int) -> None:
    """Refuse layers for which transformers' own cache does not keep all keys and values in the window."""
    for kept, layer in zip(windows, layers, strict=False):
        if kept < positions and kept not in (0, layer.window):
            seen = layer.window or "all"
            raise Unservable(f"keeps {kept} tokens for {layer.module} in transformers' cache, whose mask shows {seen}")


def _check_positions(model: Any, counting: Set[Any], callers: Set[Any]) -> None:
    """Refuse modules that count the rows of a step. Experts do so for indices: they have weights and no attention."""
    for path, module in model.named_modules():
        if module in counting and (next(module.parameters(), None) is None or callers & set(module.modules())):
            raise Unservable(f"counts tokens in {path} in place of reading their positions")


def _num_positions(text: Any) -> int:
    """Return the number of positions. Beyond it, ``longrope`` would rotate all rows of a step by the longest one."""
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 2:
        raise Unservable("has no max_position_embeddings in its config.json")
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if rope.get("rope_type") == "longrope":
            positions = min(positions, int(rope.get("original_max_position_embeddings") or positions))
    return positions


def _prepare(hello: bytes) -> tuple[bytes, Answer | None]:
    import transformers  # once, for the model and its draft model

    return transformers.__version__.encode(), answer


def answer(question: bytes) -> bytes:
    """Return the measured layout of a ``config.json``, or why there is none."""
    found: MeasuredConfig | Refused
    try:
        be_quiet()
        found = measure(question.decode())
    except Unservable as reason:
        found = Refused(str(reason))
    except Exception as error:  # the library, of which any release may raise anything for a hostile config
        text = f"{type(error).__name__}: {one_line(' '.join(str(error).split()))[:MAX_SHOWN]}"
        found = Refused(f"cannot be built by transformers: {text}")
    return msgspec.msgpack.encode(found)


if __name__ == "__main__":
    serve(_prepare, EXTRA_BYTES)
