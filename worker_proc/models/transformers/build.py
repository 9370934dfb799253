"""Builds a checkpoint's class of transformers, without data; then gives it memory, and values that no file has.

Code beside a checkpoint (``auto_map``) is never run, and nothing is downloaded.
"""

import json
import os
import re
from collections.abc import Set
from inspect import Parameter, signature
from typing import Any

import torch

from quire.protocol.process.cache_folder import set_compiler_folder

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported; nothing here needs the network
set_compiler_folder()


class Unservable(Exception):
    """Why a model cannot be served: half a sentence whose subject is the model."""


def read_settings(settings: str) -> Any:
    """Return the config object of a ``config.json``, by its text.

    Raises:
        Unservable: transformers does not know the model, or cannot read its settings.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = json.loads(settings, object_hook=_number)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = " (code named by auto_map is never run)" if raw.get("auto_map") else ""
        raise Unservable(f"has model_type {kind!r}, which this version of transformers does not know{own}")
    # Only the class may choose what it attends with, it returns hidden states alone, and Quire reads quantised weights.
    drop = ["attn_implementation", "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict"]
    drop += ["quantization_config"]
    config = CONFIG_MAPPING[kind].from_dict({name: value for name, value in raw.items() if name not in drop})
    config.use_cache = False
    return config


def _number(part: dict[str, Any]) -> Any:
    """Return the number that transformers writes as ``{"__float__": "Infinity"}``, because JSON has none such."""
    return float(part["__float__"]) if part.keys() == {"__float__"} else part


def build_module(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """Return the model with a head for tokens on the ``meta`` device, in inference mode, with tied weights tied.

    Args:
        dtype: dtype of the weights, except those that the class keeps in float32.
        attention: name of the attention function.

    Raises:
        Unservable: the class is no causal language model, or does not call the attention function.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise Unservable(f"is a {config.model_type}, which reads images and is not among those of docs/models.md")
        raise Unservable(f"is a {config.model_type}, for which transformers has no causal language model")
    with torch.device("meta"), no_init_weights():
        make: Any = AutoModelForCausalLM.from_config
        try:
            model = make(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False).eval()
        except KeyError as missing:
            if missing.args != (attention,):
                raise
            raise Unservable("chooses what computes its attention from a table of its own") from None
    name = type(model).__name__
    # Classes with layers of other kinds use the interface and do not set the flag.
    if not (model._supports_attention_backend or model._can_set_attn_implementation()):
        raise Unservable(f"is a {name}, whose code has no interface for attention")
    # It looks at the values of tokens in each step, only to warn of padding, which rows of a step do not have.
    base_of(model).warn_if_padding_and_no_attention_mask = lambda *given: None
    model.tie_weights()
    for path, weight in model.named_parameters():
        if stays_wide(model, path, dtype):
            weight.data = weight.data.float()
    return model.requires_grad_(False)


def base_name(model: Any) -> str:
    """Return the attribute of a model with a head that has the model without it.

    Raises:
        Unservable: there is none.
    """
    from transformers import PreTrainedModel

    if model.base_model is not model:
        return str(model.base_model_prefix)
    found = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    if len(found) != 1:
        raise Unservable(f"is a {type(model).__name__}, whose head has no base model below it")
    return str(found[0])


def base_of(model: Any) -> Any:
    """Return the model without its head, as ``base_name``."""
    return getattr(model, base_name(model))


def stays_wide(model: Any, path: str, dtype: torch.dtype) -> bool:
    """Whether a weight is float32 whatever the model's dtype, as its class asks: routers' biases, some norms."""
    names = set(model._keep_in_fp32_modules_strict if dtype is not torch.float32 else ())
    names |= set(model._keep_in_fp32_modules if dtype is torch.float16 else ())
    return any(re.search(name.replace("*", ".*"), path) for name in names)


def allocate(model: Any, device: torch.device | str, without: Set[int] = frozenset(), *, data: bool = True) -> None:
    """Move a model from ``meta`` to a device: weights with any values, and buffers as their classes compute them.

    Args:
        without: ids of weights that stay on ``meta``.
        data: each weight has memory of its own; else all its elements are one zero, and it cannot be written.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) not in made:
                zero = torch.zeros(1, dtype=weight.dtype, device=device)
                place = "meta" if id(weight) in without else device
                own = torch.empty_like(weight, device=place) if data else zero.expand(weight.shape)
                made[id(weight)] = torch.nn.Parameter(own, requires_grad=False)
                made[id(weight)]._is_hf_initialized = True  # type: ignore[attr-defined]  # not to be drawn at random
            module._parameters[name] = weight if weight is None else made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    model.initialize_weights()


def settings_of(base: Any) -> dict[str, Any]:
    """Return the arguments of a base model beside its tokens and their positions.

    Raises:
        Unservable: it takes no positions, so that it would count through the rows of a step as if they were one.
    """
    names = signature(base.forward).parameters
    if "position_ids" not in names:
        raise Unservable(f"takes no position_ids ({type(base).__name__})")
    takes_any = any(name.kind is Parameter.VAR_KEYWORD for name in names.values())
    return {"use_cache": False} if takes_any or "use_cache" in names else {}


def be_quiet() -> None:
    """Keep the library's advice for people who call it themselves out of this process's log."""
    from transformers.utils import logging

    set_verbosity: Any = logging.set_verbosity
    set_verbosity(40)  # ERROR of the standard library
