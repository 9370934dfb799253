"""Quantised copies of tiny checkpoints, and the weights that their formats define, by the published formulas.

Formats of compressed-tensors are written by that library. The weights are calculated from the stored tensors here.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Returns a weight's stored tensors by suffix, and the float32 weight that they stand for."""

FILE = "model.safetensors"
_PROJECTION = re.compile(
    r".*\.(?:(?:[qkvo]|qkv|q_a|q_b|kv_b|gate|up|gate_up|down)_proj|kv_a_proj_with_mqa|w[123])\.weight"
)
_ALL_EXPERTS = re.compile(r"(.*\.feed_forward\.experts)\.(gate_up|down)_proj")
GROUP = 32

Format = tuple[dict[str, Any], Pack]
"""``quantization_config`` and the packer of each weight."""


def quantise_checkpoint(
    source: Path, folder: Path, form: Format, *, leave: str = "lm_head", bfloat16: bool = False
) -> Path:
    """Copy a checkpoint with quantised projections to ``folder / "packed"``, with Llama 4's experts one by one.

    Args:
        leave: pattern of the names that stay plain.
        bfloat16: store all other tensors in bfloat16.

    Returns:
        A folder with a plain float32 checkpoint of the same weights, for transformers.
    """
    packed, plain = folder / "packed", folder / "plain"
    shutil.copytree(source, packed)
    shutil.copytree(source, plain)
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in load_file(source / FILE).items():
        if _PROJECTION.fullmatch(name) and not re.search(leave, name):
            tensors, dense[name] = form[1](tensor)
            stored |= {f"{name.removesuffix('weight')}{suffix}": value for suffix, value in tensors.items()}
        elif match := _ALL_EXPERTS.fullmatch(name):
            parts, values = match[2].split("_"), []
            for expert, matrix in enumerate(tensor.transpose(1, 2)):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    tensors, value = form[1](rows.contiguous())
                    own = f"{match[1]}.{expert}.{part}_proj"
                    stored |= {f"{own}.{suffix}": value for suffix, value in tensors.items()}
                    values.append(value)
            dense[name] = torch.cat(values).unflatten(0, (len(tensor), -1)).transpose(1, 2)
        else:
            stored[name] = tensor.bfloat16() if bfloat16 else tensor
            dense[name] = stored[name].float()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, packed / FILE)
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, plain / FILE, metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": form[0]}
    (packed / "config.json").write_text(json.dumps(config))
    return plain


def compressed(layout: str, *, activations: dict[str, Any] | None = None, **weights: Any) -> Format:
    """Return a format of compressed-tensors; ``weights`` are its ``QuantizationArgs``."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grouped = _grouped(weight, args)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        scale = scale.bfloat16().float()
        state = {"weight": weight, "weight_scale": scale}
        if not args.symmetric:
            state["weight_zero_point"] = zero
        tensors = dict(compressor.compress(state, scheme))
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
        return tensors, _value_of_compressed(tensors, weight.shape, args)

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return config, pack


def _grouped(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """Return the weights of each scale along the last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight.unsqueeze(1)
    if args.strategy == "group":
        return weight.unflatten(1, (-1, args.group_size))
    rows, columns = args.block_structure
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).permute(0, 2, 1, 3).flatten(2)


def _value_of_compressed(tensors: Tensors, shape: torch.Size, args: Any) -> torch.Tensor:
    scale = tensors["weight_scale"].float()
    zero = torch.zeros(1)
    if "weight_packed" in tensors:
        values = fields(tensors["weight_packed"], args.num_bits) - 2 ** (args.num_bits - 1)
        if not args.symmetric:
            zero = fields(tensors["weight_zero_point"].T, args.num_bits).T - 2.0 ** (args.num_bits - 1)
    else:
        values = tensors["weight"].float()
        zero = tensors.get("weight_zero_point", zero).float()
    return (values - spread(zero, shape, args.block_structure)) * spread(scale, shape, args.block_structure)


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words along the last dimension, from the lowest bits on, as float32."""
    wide = words.long() & 0xFFFFFFFF
    return torch.stack([wide >> shift & (2**bits - 1) for shift in range(0, 32, bits)], -1).flatten(-2).float()


def spread(scale: torch.Tensor, shape: torch.Size, block: list[int] | None = None) -> torch.Tensor:
    """Repeat scales ``[rows, groups]`` to the shape of the weight."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape)
    rows = block[0] if block else 1
    columns = block[1] if block else shape[1] // scale.shape[1]
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def fp8(block: list[int] | None) -> Format:
    """Return method fp8: blocks with ``weight_scale_inv`` (DeepSeek, Qwen), or one scale and one for activations."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = block or weight.shape
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        scale = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3)) / 448
        codes = (weight / spread(scale, weight.shape, block)).to(torch.float8_e4m3fn)
        value = codes.float() * spread(scale, weight.shape, block)
        if block:
            return {"weight": codes, "weight_scale_inv": scale}, value
        return {"weight": codes, "weight_scale": scale.squeeze(), "input_scale": torch.tensor(0.5)}, value

    scheme = "dynamic" if block else "static"
    return {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}, pack


def _random_integers(
    weight: torch.Tensor, bits: int, symmetric: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random codes like the weight's, zero points and float16 scales ``[outputs, groups]``, all unsigned."""
    outputs, inputs = weight.shape
    shape = (outputs, inputs // GROUP)
    codes = torch.randint(0, 2**bits, weight.shape, generator=generator)
    zeros = torch.full(shape, 2 ** (bits - 1))
    if not symmetric:
        zeros = torch.randint(0, 2**bits, shape, generator=generator)
    scales = (torch.rand(shape, generator=generator) + 0.5) * float(weight.std()) * 4 / 2**bits
    return codes, zeros, scales.half()


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned codes along the last dimension, the first in the lowest bits, as int32."""
    grouped = codes.unflatten(-1, (-1, 32 // bits)).long()
    total = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def gptq(bits: int, *, symmetric: bool = True, act_order: bool = False, version: int = 1) -> Format:
    generator = torch.Generator().manual_seed(bits)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales = _random_integers(weight, bits, symmetric, generator)
        groups = torch.arange(weight.shape[1]) // GROUP
        if act_order:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        stored_zeros = (zeros - 1) % 2**bits if version == 1 else zeros
        tensors = {
            "qweight": _words(codes, bits).T,
            "qzeros": _words(stored_zeros.T, bits),
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order}
    return config | {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, pack


def awq() -> Format:
    generator = torch.Generator().manual_seed(7)

    def interleaved(codes: torch.Tensor) -> torch.Tensor:
        """Pack along the last dimension: the fields of a word are the codes 0, 2, 4, 6, 1, 3, 5, 7."""
        return _words(codes.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales = _random_integers(weight, 4, False, generator)
        tensors = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T}
        return tensors, (codes - spread(zeros, weight.shape)) * spread(scales.float(), weight.shape)

    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, pack


def nvfp4() -> Format:
    """Return NVFP4 as compressed-tensors writes it."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, **FP4_SCALES)
        grouped = weight.unflatten(1, (-1, 16))
        whole = generate_gparam(weight.amin(), weight.amax())
        scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args, global_scale=whole)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        tensors = dict(BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compress(state, scheme))
        octets = tensors["weight_packed"].long()
        codes = torch.stack([octets & 15, octets >> 4], -1).flatten(1)
        values = torch.cat([magnitudes, -magnitudes])[codes]
        return tensors, values * spread(tensors["weight_scale"].float() / whole, weight.shape)

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }, pack


def with_act_order() -> Format:
    """Return W4A16 of older llm-compressor, with actorder group."""
    config, pack = compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    generator = torch.Generator().manual_seed(5)

    def pack_in_order(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, _ = pack(weight)
        groups = (torch.arange(weight.shape[1]) // GROUP)[torch.randperm(weight.shape[1], generator=generator)]
        values = fields(tensors["weight_packed"], 4) - 8
        tensors["weight_g_idx"] = groups.int()
        return tensors, values * tensors["weight_scale"].float()[:, groups]

    return config, pack_in_order


def modelopt(algorithm: str, pack: Pack) -> Format:
    """Return a format of ModelOpt, from another's tensors of the same form."""

    def renamed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, value = pack(weight)
        if algorithm == "NVFP4":
            tensors["weight"] = tensors.pop("weight_packed")
            tensors["weight_scale_2"] = (1 / tensors.pop("weight_global_scale")).squeeze()
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, value

    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": ["lm_head"]}, renamed


FP4_SCALES = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}

FORMATS: dict[str, Callable[[], Format]] = {
    "w4a16": lambda: compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
    "w4a16-asymmetric": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False
    ),
    "w4a16-channel": lambda: compressed("pack-quantized", num_bits=4, strategy="channel"),
    "w8a16": lambda: compressed("pack-quantized", num_bits=8, strategy="channel"),
    "w8a16-asymmetric": lambda: compressed(
        "pack-quantized", num_bits=8, strategy="group", group_size=GROUP, symmetric=False
    ),
    "int8-weights": lambda: compressed("int-quantized", num_bits=8, strategy="channel"),
    "int8-asymmetric": lambda: compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "int8-asymmetric-tensor": lambda: compressed("int-quantized", num_bits=8, strategy="tensor", symmetric=False),
    "w8a8": lambda: compressed("int-quantized", num_bits=8, strategy="channel", activations=TOKEN_INT8),
    "fp8-tensor": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-token": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="channel", activations=TOKEN_INT8 | {"type": "float"}
    ),
    "fp8-small-blocks": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "fp8-blocks": lambda: compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "fp8-inverse-scales": lambda: fp8([128, 128]),
    "fp8-one-scale": lambda: fp8(None),
    "gptq": lambda: gptq(4),
    "gptq-act-order": lambda: gptq(4, act_order=True),
    "gptq-asymmetric": lambda: gptq(4, symmetric=False, act_order=True),
    "gptq-version-2": lambda: gptq(4, symmetric=False, version=2),
    "gptq-8-bits": lambda: gptq(8, symmetric=False),
    "awq": lambda: awq(),
    "w4a16-act-order": lambda: with_act_order(),
    "nvfp4": lambda: nvfp4(),
    "modelopt-fp8": lambda: modelopt("FP8", fp8(None)[1]),
    "modelopt-nvfp4": lambda: modelopt("NVFP4", nvfp4()[1]),
}
