"""A tiny checkpoint, written by hand, and ways to damage it."""

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.protocol.model.checkpoint import check_sizes, stored_tensors
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import load_weights

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
VOCAB, HIDDEN, WIDE = 24, 8, 12
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def shapes() -> dict[str, list[int]]:
    kv, found = HIDDEN // 2, {"model.embed_tokens.weight": [VOCAB, HIDDEN]}
    for layer in range(2):
        base = f"model.layers.{layer}"
        for name, rows, columns in (
            *(("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", kv, HIDDEN)),
            *(("self_attn.v_proj", kv, HIDDEN), ("self_attn.o_proj", HIDDEN, HIDDEN)),
            *(("mlp.gate_proj", WIDE, HIDDEN), ("mlp.up_proj", WIDE, HIDDEN), ("mlp.down_proj", HIDDEN, WIDE)),
        ):
            found[f"{base}.{name}.weight"] = [rows, columns]
        found[f"{base}.input_layernorm.weight"] = [HIDDEN]
        found[f"{base}.post_attention_layernorm.weight"] = [HIDDEN]
    return found | {"model.norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]}


def header_of(names: dict[str, list[int]]) -> dict[str, Any]:
    header, at = {}, 0
    for name, shape in names.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header


def packed(header: Any, data: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def weights(count: int) -> bytes:
    return struct.pack(f"<{count}f", *(((7 * i) % 23 - 11) / 16 for i in range(count)))


def write(folder: Path, *, sharded: bool = False, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(TINY | config))
    names = shapes()
    if not sharded:
        (folder / SINGLE).write_bytes(packed(header_of(names), weights(sum(map(math.prod, names.values())))))
        return folder
    halves = {"a.safetensors": list(names)[:10], "b.safetensors": list(names)[10:]}
    for file, held in halves.items():
        own = {name: names[name] for name in held}
        (folder / file).write_bytes(packed(header_of(own), weights(sum(map(math.prod, own.values())))))
    weight_map = {name: file for file, held in halves.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def open_checkpoint(folder: Path) -> None:
    """Do everything that the engine does with a checkpoint before the first token, in the same order; raise its
    errors."""
    config = load_model_config(folder)
    check_sizes(folder, stored_tensors(folder), config)
    build_model(config, torch.float32, "meta", 64)
    model = build_model(config, torch.float32, "cpu", 64)
    load_weights(model, folder, torch.float32, progress=False)


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and tensors."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


# ---- random damage

NUMBERS: list[Any] = [
    -(2**63), -1, 0, 1, 2, 3, 7, 8, 96, 2**16, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, -0.5, 0.5, 1e-30, 1e300,
    math.nan, math.inf, True, None, "8", "", [], {}, [8], [[8]], "x" * 300, "\n\x1b[31m",
]  # fmt: skip
Mutation = Callable[[Path, random.Random], None]


def damage_bytes(folder: Path, rng: random.Random) -> None:
    """Change a few bytes of the file, mostly of its header."""
    file = folder / SINGLE
    data = bytearray(file.read_bytes())
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(rng.randint(1, 3)):
        at = (
            rng.randrange(len(data))
            if rng.random() < 0.2
            else rng.choice((rng.randrange(8), rng.randrange(header_end)))
        )
        at = min(at, len(data) - 1)
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randint(1, 40)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
        if not data:
            break
    file.write_bytes(data)


def damage_length(folder: Path, rng: random.Random) -> None:
    """Make the file longer or shorter, or change the length of the header that it gives."""
    file = folder / SINGLE
    data = file.read_bytes()
    if rng.random() < 0.5:
        file.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.7 else data + bytes(rng.randint(1, 99)))
    else:
        told = rng.choice(
            (0, 1, 7, len(data) - 8, len(data), 10**8, 2**31, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64))
        )
        file.write_bytes(struct.pack("<Q", told) + data[8:])


def damage_header(folder: Path, rng: random.Random) -> None:
    """Replace an entry of the header by another well-formed one."""
    header, data = split(folder / SINGLE)
    name = rng.choice(list(header))
    entry = header[name]
    other = header[rng.choice(list(header))]
    match rng.randrange(9):
        case 0:
            entry["dtype"] = rng.choice(["F64", "F16", "BF16", "I32", "I8", "U8", "BOOL", "F8_E4M3", "C64", *NUMBERS])
        case 1:
            entry["shape"] = rng.choice([[], [1], [*entry["shape"], 1], entry["shape"][::-1] * 2, *NUMBERS])
        case 2:
            entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(NUMBERS)
        case 3:
            entry["data_offsets"] = rng.choice([other["data_offsets"], entry["data_offsets"][::-1], [0], *NUMBERS])
        case 4:
            entry["data_offsets"][rng.randrange(2)] = rng.choice([*NUMBERS, len(data), len(data) + 1])
        case 5:
            del header[name]
        case 6:
            header[rng.choice(["", "x", "../x", name.upper(), "a" * 5000, "__metadata__", "x\n\x1b[2Jy"])] = entry
        case 7:
            header[name] = rng.choice(NUMBERS)
        case _:
            del entry[rng.choice(list(entry))]
    (folder / SINGLE).write_bytes(packed(header, data))


def damage_config(folder: Path, rng: random.Random) -> None:
    """Give a field of config.json an absurd value, or add an unknown one."""
    config = json.loads((folder / CONFIG).read_text())
    more = ["rope_scaling", "rope_parameters", "head_dim", "quantization_config", "sliding_window", "layer_types",
            "attention_bias", "partial_rotary_factor", "num_experts", "text_config", "auto_map", "dtype"]  # fmt: skip
    ropes = [{"rope_type": kind, name: value} for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")
             for name, value in (("factor", 2.0), ("factor", math.inf), ("original_max_position_embeddings", 1),
                                 ("short_factor", [math.inf] * 2))]  # fmt: skip
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*TINY, *more])
        config[name] = rng.choice(ropes if name.startswith("rope_") and rng.random() < 0.7 else NUMBERS)
        if rng.random() < 0.1:
            del config[name]
    (folder / CONFIG).write_text(json.dumps(config))


def damage_config_text(folder: Path, rng: random.Random) -> None:
    text = bytearray((folder / CONFIG).read_bytes())
    at = rng.randrange(len(text))
    match rng.randrange(4):
        case 0:
            del text[at:]
        case 1:
            text[at] = rng.randrange(256)
        case 2:
            text[at:at] = rng.choice((b"[" * 20_000, b'{"a":' * 20_000, b"9" * 6000, b"\xff\xfe", b"\x00"))
        case _:
            text[at:at] = text[:at]
    (folder / CONFIG).write_bytes(text)


def damage_weights(folder: Path, rng: random.Random) -> None:
    """Put a NaN into a weight."""
    file = folder / SINGLE
    data = bytearray(file.read_bytes())
    count = sum(map(math.prod, shapes().values()))
    at = len(data) - 4 * (1 + rng.randrange(count))
    data[at : at + 4] = struct.pack("<f", rng.choice((math.nan, math.inf, -math.inf)))
    file.write_bytes(data)


MUTATIONS: dict[str, Mutation] = {
    "bytes": damage_bytes,
    "length": damage_length,
    "header": damage_header,
    "config": damage_config,
    "config text": damage_config_text,
    "weights": damage_weights,
}
