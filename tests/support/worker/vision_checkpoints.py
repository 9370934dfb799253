"""Tiny random checkpoints with a vision tower, pictures as real processors make them, and transformers' tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
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
_LLAMA = {"model_type": "llama", **TEXT}
_LLAVA = {"text_config": _LLAMA, "vision_config": {"model_type": "clip_vision_model", **EYES}}
_CROP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_GRIDS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}
_QWEN3 = {"model_type": "qwen3", **TEXT, "head_dim": 16}
_SQUARE = {"size": {"height": 28, "width": 28}}
_SMOL = {"text_config": {"model_type": "llama", **TEXT}, "vision_config": EYES | {"patch_size": 7}, "scale_factor": 2}
_TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
_PATCHES = {"size": {"shortest_edge": 28 * 28 * 6, "longest_edge": 28 * 28 * 16}}
_PIXTRAL = {"model_type": "pixtral", **EYES, "image_size": 56, "patch_size": 7, "head_dim": 8}
_ANY_SIZE = ("PixtralImageProcessor", {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}})
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DEEP = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}

_DEEPSTACK = _DEEP | {"patch_size": 14, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 16}
_DEEP_TEXT = TEXT | {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2]}, "head_dim": 16}


@dataclass(frozen=True)
class _Case:
    """``model``: transformers' name before ``Config``. ``processor``: name and settings of the image processor."""

    model: str
    settings: dict[str, Any]
    processor: tuple[str, dict[str, Any]]
    tiles: int = 0
    """Rows of a tile, between which the prompt has a token."""


CASES = {
    "llava": _Case("Llava", _LLAVA, ("CLIPImageProcessor", _CROP)),
    "vipllava": _Case("VipLlava", {**_LLAVA, "vision_feature_layer": [-1, -2]}, ("CLIPImageProcessor", _CROP)),
    "llava_next": _Case("LlavaNext", _LLAVA | _GRIDS, ("LlavaNextImageProcessor", _CROP | _GRIDS)),
    "llava_next_video": _Case(
        "LlavaNextVideo", _LLAVA | _GRIDS | {"video_token_index": 121}, ("LlavaNextImageProcessor", _CROP | _GRIDS)
    ),
    "deepseek_vl": _Case(
        "DeepseekVL",
        {"text_config": _LLAMA, "vision_config": {"model_type": "siglip_vision_model", **EYES}},
        ("DeepseekVLImageProcessor", _SQUARE),
    ),
    "janus": _Case(
        "Janus",
        {
            "text_config": _LLAMA,
            "vision_config": EYES | {"projection_dim": 64, "mlp_ratio": 2, "depth": 2},
            "vq_config": {"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1]}
            | {"num_res_blocks": 1, "projection_dim": 64, "num_patches": 4, "image_token_embed_dim": 64},
        },
        ("JanusImageProcessor", _SQUARE),
    ),
    "got_ocr2": _Case(
        "GotOcr2",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": EYES
            | {"output_channels": 8, "image_size": 64, "patch_size": 8, "window_size": 2, "mlp_dim": 16}
            | {"global_attn_indexes": [1]},
        },
        ("GotOcr2ImageProcessor", {"size": {"height": 64, "width": 64}, "crop_to_patches": False}),
    ),
    "video_llama_3": _Case(
        "VideoLlama3",
        {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {**EYES, "hidden_size": 32}},
        ("VideoLlama3ImageProcessor", _PATCHES),
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
        ("Gemma3ImageProcessor", _SQUARE),
    ),
    "smolvlm": _Case("SmolVLM", _SMOL, ("SmolVLMImageProcessor", _TILES), tiles=4),
    "idefics3": _Case("Idefics3", _SMOL, ("Idefics3ImageProcessor", _TILES), tiles=4),
    "mistral3": _Case(
        "Mistral3",
        {"text_config": {"model_type": "mistral", **TEXT, "head_dim": 16}, "vision_config": _PIXTRAL},
        _ANY_SIZE,
    ),
    "lighton_ocr": _Case("LightOnOcr", {"text_config": _QWEN3, "vision_config": _PIXTRAL}, _ANY_SIZE),
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
        {"text_config": _DEEP_TEXT, "vision_config": _DEEPSTACK},
        ("Qwen2VLImageProcessor", _PATCHES),
    ),
    "qwen3_vl_moe": _Case(
        "Qwen3VLMoe",
        {
            "text_config": _DEEP_TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
            "vision_config": _DEEPSTACK,
        },
        ("Qwen2VLImageProcessor", _PATCHES),
    ),
}


def make_checkpoint(folder: Path, name: str, seed: int = 0) -> Any:
    """Save a checkpoint of ``CASES``, and return transformers' model of it."""
    import transformers

    case = CASES[name]
    kind = getattr(transformers, f"{case.model}Config")
    config = kind(**case.settings, **{kind.attribute_map.get("image_token_id", "image_token_id"): IMAGE})
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
            self.items.append(
                InputItem(bytes([self.first + len(self.items)]).ljust(32, b"\0"), ranges, "", "image", part.grid)
            )

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]


def greedy_tokens(model: Any, prompt: Prompt, num_tokens: int) -> list[int]:
    """Return transformers' greedy tokens."""
    names = {name for picture in prompt.pictures for name in picture.tensors}
    given: dict[str, Any] = {
        name: _joined(name, [picture.tensors[name] for picture in prompt.pictures], "image_sizes" in names)
        for name in names
    }
    ids = torch.tensor([prompt.ids])
    if prompt.items and "mm_token_type_ids" in signature(model.forward).parameters:
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


def _joined(name: str, tensors: list[torch.Tensor], has_sizes: bool) -> torch.Tensor:
    """Join the tensors of some pictures as processors do: padded to the largest."""
    if name == "pixel_attention_mask" or (tensors[0].dim() == 5 and not has_sizes):
        return torch.cat(tensors, 1)  # [prompts, tiles of all pictures, ...]
    if tensors[0].dim() < 4:
        return torch.cat(tensors)
    most = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    padding = [[p for d in range(each.dim() - 1, 0, -1) for p in (0, most[d] - each.shape[d])] for each in tensors]
    return torch.cat([F.pad(*each) for each in zip(tensors, padding, strict=True)])
