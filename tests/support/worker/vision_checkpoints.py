"""Tiny random checkpoints with a vision tower, pictures as real processors make them, and transformers' tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from quire.protocol.wire.item_messages import InputItem

IMAGE = 120
"""Token id of all families' placeholders."""
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.2,
}
_SMOL = {"text_config": {"model_type": "llama", **TEXT}, "vision_config": EYES | {"patch_size": 7}, "scale_factor": 2}
_TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_PATCHES = {"size": {"shortest_edge": 28 * 28 * 6, "longest_edge": 28 * 28 * 16}}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEEP = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}


@dataclass(frozen=True)
class _Case:
    """``model``: transformers' name before ``Config``. ``processor``: name and settings of the image processor."""

    model: str
    settings: dict[str, Any]
    processor: tuple[str, dict[str, Any]]
    tiles: int = 0
    """Rows of a tile, between which the prompt has a token."""


CASES = {
    "llava": _Case(
        "Llava",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": {"model_type": "clip_vision_model", **EYES}},
        ("CLIPImageProcessor", {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}),
    ),
    "gemma3": _Case(
        "Gemma3",
        {
            "text_config": TEXT
            | {"head_dim": 16, "sliding_window": 18, "query_pre_attn_scalar": 16}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "vision_config": EYES | {"patch_size": 7},
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
        ("Gemma3ImageProcessor", {"size": {"height": 28, "width": 28}}),
    ),
    "smolvlm": _Case("SmolVLM", _SMOL, ("SmolVLMImageProcessor", _TILES), tiles=4),
    "idefics3": _Case("Idefics3", _SMOL, ("Idefics3ImageProcessor", _TILES), tiles=4),
    "mistral3": _Case(
        "Mistral3",
        {
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "pixtral", **EYES, "image_size": 56, "patch_size": 7, "head_dim": 8},
        },
        ("PixtralImageProcessor", {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}}),
    ),
    "internvl": _Case(
        "InternVL",
        {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": EYES | {"image_size": [28, 28]}},
        ("GotOcr2ImageProcessor", {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 2}),
    ),
    "qwen2_vl": _Case(
        "Qwen2VL",
        {
            "text_config": TEXT | {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
        },
        ("Qwen2VLImageProcessor", _PATCHES),
    ),
    "qwen2_5_vl": _Case(
        "Qwen2_5_VL",
        {
            "text_config": TEXT | {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
            "vision_config": _DEEP | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        },
        ("Qwen2VLImageProcessor", _PATCHES),
    ),
    "qwen3_vl": _Case(
        "Qwen3VL",
        {
            "text_config": TEXT | {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}, "head_dim": 16},
            "vision_config": _DEEP
            | {"patch_size": 14, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16},
        },
        ("Qwen2VLImageProcessor", _PATCHES),
    ),
}


def make_checkpoint(folder: Path, name: str, seed: int = 0) -> Any:
    """Save a checkpoint of ``CASES``, and return transformers' model of it."""
    import transformers

    case = CASES[name]
    ids = {"image_token_id": IMAGE} | ({"image_token_index": IMAGE} if name in ("llava", "mistral3", "gemma3") else {})
    config = getattr(transformers, f"{case.model}Config")(**case.settings, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{case.model}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for weight in model.parameters():  # what begins at 0 or 1 would prove nothing
                if weight.dim() < 2 or not weight.any():
                    weight.add_(torch.randn(weight.shape) * (0.2 if weight.dim() < 2 else 1.0))
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Picture:
    """``tensors``: those of the model's processor. ``rows``: number of rows that its tower makes of them."""

    tensors: dict[str, torch.Tensor]
    rows: int
    tiles: int
    grid: tuple[int, ...]

    def save(self, path: Path) -> Path:
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path)
        return path


def make_picture(model: Any, name: str, width: int, height: int, seed: int = 0) -> Picture:
    import transformers
    from PIL import Image

    case = CASES[name]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    processor = getattr(transformers, f"{case.processor[0]}Pil")(**case.processor[1])
    found = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    tensors = {key: value for key, value in found.items() if key not in ("num_patches", "num_crops")}
    with torch.no_grad():
        made = model.model.get_image_features(**tensors, return_dict=True).pooler_output
    parts = made if isinstance(made, list | tuple) else [made]
    rows = sum(part.numel() // TEXT["hidden_size"] for part in parts)
    grid = tuple(tensors["image_grid_thw"][0].tolist()) if "image_grid_thw" in tensors else ()
    return Picture(tensors, rows, case.tiles, grid)


@dataclass
class Prompt:
    """Tokens with pictures among them, and the items of a row. Pictures are numbered in their order, from ``first``."""

    parts: Sequence[list[int] | Picture]
    first: int = 1
    ids: list[int] = field(default_factory=list)
    items: list[InputItem] = field(default_factory=list)

    def __post_init__(self) -> None:
        for part in self.parts:
            if isinstance(part, list):
                self.ids += part
                continue
            ranges, left = [], part.rows
            while left:
                count = min(left, part.tiles or left)
                ranges.append((len(self.ids), count))
                self.ids += [IMAGE] * count + ([7] if part.tiles else [])
                left -= count
            self.items.append(InputItem(bytes([self.first + len(self.items)]), ranges, "", "image", part.grid))

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]


def greedy_tokens(model: Any, prompt: Prompt, num_tokens: int) -> list[int]:
    """Return transformers' greedy tokens."""
    names = {name for picture in prompt.pictures for name in picture.tensors}
    given: dict[str, Any] = {
        name: _joined(name, [picture.tensors[name] for picture in prompt.pictures]) for name in names
    }
    ids = torch.tensor([prompt.ids])
    if prompt.items and prompt.items[0].grid:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    if "gemma3" in model.config.model_type:
        given["token_type_ids"] = (ids == IMAGE).int()
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **given,
        )
    tokens: list[int] = out[0, len(prompt.ids) :].tolist()
    return tokens


def _joined(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join the tensors of some pictures as processors do: padded to the largest."""
    if tensors[0].dim() == 5 or name == "pixel_attention_mask":  # [prompts, tiles of all pictures, ...]
        return torch.cat(tensors, 1)
    if tensors[0].dim() < 4:
        return torch.cat(tensors)
    height, width = (max(tensor.shape[dim] for tensor in tensors) for dim in (2, 3))
    return torch.cat([F.pad(each, (0, width - each.shape[3], 0, height - each.shape[2])) for each in tensors])
