"""Setup of the vision tower: transformers' own class, built without its language model, and its weights."""

from pathlib import Path
from typing import Any

import torch

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import full_name, is_text_tensor, stored_tensors
from quire.protocol.model.model_config import config_file
from quire.worker_proc.images.tower import VisionTower
from quire.worker_proc.models.weight_slot import WeightSlot
from quire.worker_proc.startup.loader import OpenFiles, fill_slots

PLANNED_ROWS = 4096
"""Rows of an image for whose encoding memory is planned: about 1800 by 1800 pixels for Qwen's towers. A larger one
takes what is free, and fails alone if that does not suffice."""


def build_tower(config: EngineConfig, dtype: torch.dtype) -> VisionTower | None:
    """Build the tower of a model on ``meta``, or return None if requests cannot have images.

    Raises:
        ConfigError: transformers cannot build the class.
    """
    vision = config.model.vision
    if vision is None or "image" not in config.item_kinds:
        return None
    from transformers import AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    from quire.worker_proc.models.transformers.build import Unservable, be_quiet, read_settings

    be_quiet()
    file = config_file(Path(config.model_path))
    try:
        settings = read_settings(file.read_text(encoding="utf-8"))
        with torch.device("meta"), no_init_weights():
            make: Any = AutoModelForImageTextToText.from_config
            model = make(settings, dtype=dtype, trust_remote_code=False).eval()
    except (Unservable, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: transformers cannot build its vision tower: {error}") from None
    _drop_language_model(model)
    return VisionTower(model.requires_grad_(False), vision, config.model.hidden_size, dtype)


def _drop_language_model(model: Any) -> None:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    for part in list(model.modules()):
        for name, child in part.named_children():
            if child is decoder or child is head:
                setattr(part, name, torch.nn.Identity())


def load_tower(tower: VisionTower | None, config: EngineConfig, device: torch.device) -> None:
    """Read the weights of everything but the language model to the device.

    Raises:
        ConfigError: a tensor is missing, of the wrong shape, or not finite.
    """
    if tower is None:
        return
    from quire.worker_proc.models.transformers.build import allocate
    from quire.worker_proc.models.transformers.load import tensor_sources

    model = tower.model
    allocate(model, device)
    slots = {name: WeightSlot(tensor, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    if config.load_format == "dummy":
        generator = torch.Generator().manual_seed(config.seed)
        for slot in slots.values():
            slot.target.copy_(torch.empty(slot.shape).normal_(0.0, 0.02, generator=generator))
        return
    folder = Path(config.model_path)
    stored = stored_tensors(folder, renamed=False)
    own = {name: tensor for name, tensor in stored.items() if not is_text_tensor(full_name(name))}
    sources = tensor_sources(folder, own, model, slots)
    with torch.inference_mode(), OpenFiles() as files:
        fill_slots(sources.pieces, files)


def image_bytes(config: EngineConfig, tower: VisionTower | None, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the tower's weights, and those of the encoder cache with what encoding an image may take.

    That is, for each patch, a layer's input, the projections, their result, and the widened input of its MLP twice.
    """
    weights, rows, values = 0, config.encoder_cache_tokens, config.encoder_cache_tokens * config.model.hidden_size
    if tower is not None:  # otherwise there are given embeddings alone
        weights = sum(int(weight.nbytes) for weight in tower.model.parameters())
        whole, eyes = tower.model.config, tower.model.config.vision_config
        width = getattr(eyes, "embed_dim", None) or eyes.hidden_size
        wide = getattr(eyes, "intermediate_size", None) or 4 * width
        side = getattr(eyes, "spatial_merge_size", None) or getattr(whole, "scale_factor", None) or 4
        patches = min(rows, PLANNED_ROWS) * int(side) ** 2
        values = (1 + tower.vision.num_deepstack) * values + patches * int(6 * width + 2 * wide)
    return weights, values * dtype.itemsize
