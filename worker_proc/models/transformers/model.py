"""A model that a class of transformers computes, as runner and loader use any other model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.kernels.attention.attention_tiles import AttentionShape
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import StoredTensor
from quire.protocol.model.kv_layout import state_tensors
from quire.version import install_command
from quire.worker_proc.attention.backend import AttentionSpec, LayerAttention, Rotary
from quire.worker_proc.models.checkpoint_names import Sources
from quire.worker_proc.models.model import Inputs, Model, Outputs, scales_of
from quire.worker_proc.models.transformers.attention import SERVED, Step, connect_layers, register
from quire.worker_proc.models.transformers.build import (
    allocate,
    base_of,
    be_quiet,
    build_module,
    read_settings,
    settings_of,
)
from quire.worker_proc.models.transformers.deterministic import serve_batches, settle
from quire.worker_proc.models.transformers.divide import Division, divide
from quire.worker_proc.models.transformers.gates import use_gates
from quire.worker_proc.models.transformers.head import Head
from quire.worker_proc.models.transformers.linears import Products
from quire.worker_proc.models.transformers.load import tensor_sources
from quire.worker_proc.models.transformers.norms import use_norms
from quire.worker_proc.models.transformers.states import connect_states
from quire.worker_proc.models.transformers.tokenwise import TokenTensors
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.models.weights import Build
from quire.worker_proc.states.calls import NO_STATES, StateCall, StateStep
from quire.worker_proc.states.pool import StatePool

_TRIED_TOKENS = 8


class _NoAttention:
    """``LayerAttention`` whose results are 0."""

    def attend(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, plan: Any, spec: AttentionSpec, rotary: Rotary | None
    ) -> torch.Tensor:
        return qkv.new_zeros(len(qkv), spec.num_heads, spec.head_dim)


class TransformersModel(Model):
    """A causal language model of transformers, whose attention is Quire's.

    All rows of a step are one sequence for transformers, and only attention, positions and states know the rows.

    Raises:
        ConfigError: this process has another version of transformers than was measured.
    """

    can_be_captured = False  # some classes read values of the device, such as how many tokens an expert has

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        measured = build.config.transformers
        assert measured is not None and measured.ranks == build.parallel.size, "it is tried for this number of ranks"
        self.measured = measured
        _check_version(measured.version)
        register(SERVED)
        be_quiet()
        self.module = build_module(read_settings(measured.settings), build.activation_dtype, SERVED)
        self.division = divide(self.module, build.parallel) if build.parallel.size > 1 else Division()
        self.products = Products(self.module, measured.replaceable, build, self.division)
        if str(build.device) != "meta":
            allocate(self.module, build.device, self.products.weights)
        use_gates(self.module, self.products.joined, build.ops)
        self.products.install()
        use_norms(self.module, build.ops, build.activation_dtype)
        self.attention = connect_layers(self.module, measured, build.activation_dtype)
        self._current = self.attention[0].current
        self._states = connect_states(self.module, measured.states)
        self._head = Head(self.module)
        self._base = base_of(self.module)
        self._settings = settings_of(self._base)
        self._deterministic = self._tokenwise = False

    def __call__(
        self, inputs: Inputs, kv_caches: Sequence[torch.Tensor], plans: Sequence[Any], backend: LayerAttention
    ) -> Outputs:
        """As ``Model.__call__``, writing keys, values and states."""
        assert inputs.is_plain, "a model of transformers takes tokens alone, and returns hidden states alone"
        self._current.step = Step(kv_caches, plans, backend)
        self._states.step = inputs.states
        try:
            ids, positions = inputs.token_ids[None], inputs.positions[None]
            if self._tokenwise:
                ids, positions = (TokenTensors.of(each.view(-1, 1, 1)) for each in (ids, positions))
            hidden: torch.Tensor = self._base(input_ids=ids, position_ids=positions, **self._settings)[0]
            return Outputs(hidden.batch()[:, 0, 0] if isinstance(hidden, TokenTensors) else hidden[0])
        finally:
            self._current.step, self._states.step = None, NO_STATES
            self.products.end_step()

    def attention_shape(self, layer: int) -> AttentionShape:
        spec = self.attention[layer].spec
        return AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, self.build.activation_dtype)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self._tokenwise:
            return self._head(hidden).float()
        logits: Any = self._head(TokenTensors.of(hidden[:, None]))
        scores: torch.Tensor = logits.batch()[:, 0].float()
        return scores

    def logits_of(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def check_loaded(self) -> None:
        """As ``Model.check_loaded``: without attention, no token of some rows must depend on the one before it.

        In deterministic mode tokens are computed alone from then on, so that none can.
        """
        tokens = torch.arange(_TRIED_TOKENS, device=self.build.device) % self.config.vocab_size
        others = tokens.clone()
        others[0] = 1
        found = [self._try(given)[1:].float() for given in (tokens, others)]
        if (found[0] - found[1]).abs().max() > self._rounding(found[0]):
            raise ConfigError(
                f"{self.measured.class_name} of transformers mixes tokens outside of attention, as a convolution does, "
                f"and would mix requests: the model cannot be served"
            )
        if self._deterministic:
            self._compute_tokens_alone(tokens)

    def new_states(self, num_tokens: int, *, one_row: bool) -> StateStep:
        if not self.measured.states:
            return NO_STATES
        layout = state_tensors(self.config, str(self.build.activation_dtype).removeprefix("torch."))
        tokens, places = slice(0, num_tokens), slice(0, 1 if one_row else num_tokens)
        pool = StatePool(layout, places.stop, torch.device(self.build.device))
        return StateStep([StateCall(tokens, places, places, is_segment=one_row)], pool.tensors)

    def _try(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of one token each of some rows, without attention."""
        layers, positions = len(self.attention), torch.arange(len(tokens), device=tokens.device)
        given = Inputs(tokens, positions, states=self.new_states(len(tokens), one_row=False))
        return self(given, [positions] * layers, [None] * layers, _NoAttention()).hidden

    def _compute_tokens_alone(self, tokens: torch.Tensor) -> None:
        expected = self.scores(self._try(tokens))
        attention = {self.module.get_submodule(layer.measured.module): layer for layer in self.attention}
        states = {self.module.get_submodule(state.module) for state in self.measured.states}
        serve_batches(self.module, dict(attention))
        self._head = Head(self.module)  # again, as other functions compute its modules now
        self._tokenwise = True
        adapted = self.build.additions is not None
        found = settle(self.module, {*attention, *states}, lambda: self.scores(self._try(tokens)), adapted=adapted)
        # Equal scores of two experts may be decided otherwise, but not for most tokens.
        near = torch.isclose(found, expected, rtol=0, atol=self._rounding(expected), equal_nan=True).all(1)
        if near.float().mean() < 0.5:
            raise ConfigError(
                f"--deterministic is not supported for {self.measured.class_name} of transformers, which computes "
                f"other logits token by token: omit the flag"
            )

    def _rounding(self, like: torch.Tensor) -> float:
        """Return how far values of about this size may differ by rounding alone."""
        eps: float = torch.finfo(self.build.activation_dtype).eps
        return float(eps**0.5 * like.abs().max())

    def set_kv_scales(self, scales: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for layer in self.attention:
            heads, total = layer.spec.num_kv_heads, self.measured.layers[layer.layer].num_kv_heads
            first = 0 if heads == total else self.build.parallel.rank * heads
            pair = (half.expand(total)[first : first + heads] for half in scales[layer.measured.source])
            own = [half.to(self.build.device).contiguous() for half in pair]
            layer.spec = replace(layer.spec, k_scale=own[0], v_scale=own[1])

    def kv_meaning(self) -> list[Any]:
        return [self.measured.class_name, self.measured.version, scales_of(layer.spec for layer in self.attention)]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [*self.module.parameters(), *super().parameters()]

    def prepack(self, *, deterministic: bool = False) -> bool:
        packed = super().prepack(deterministic=deterministic)
        self.products.prepack()
        self._deterministic = deterministic
        return packed

    def tensor_sources(self, folder: Path, stored: Mapping[str, StoredTensor]) -> Sources:
        return tensor_sources(folder, stored, self.module, self.weight_slots())

    def _slots(self) -> dict[str, WeightSlot]:
        """Return the slots by the names of the class. Tied weights share their target."""
        tensors = self.module.state_dict(keep_vars=True)
        targets = {id(tensor): tensor.detach() for tensor in tensors.values()}
        own = {name: WeightSlot(targets[id(tensor)], tuple(tensor.shape)) for name, tensor in tensors.items()}
        parts = self.division.parts.items()
        own |= {name: part.slot(own[name].target) for name, part in parts if name in own}
        return own | self.products.weight_slots()


def _check_version(measured: str) -> None:
    """Raise ConfigError unless this process has the version of transformers that was measured."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"this worker needs transformers {measured}: {install_command('transformers')}") from None
    if transformers.__version__ != measured:
        raise ConfigError(
            f"this worker has transformers {transformers.__version__}, and the model was measured with {measured}: "
            f"install the same version on all machines"
        )
