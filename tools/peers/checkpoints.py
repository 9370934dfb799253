"""Checkpoints in the forms that engines load: scripts that the interpreter with the needed packages runs.

    python checkpoints.py write CONFIG.json FOLDER SEED       # random weights in bfloat16; needs transformers
    python checkpoints.py gguf FOLDER FILE bf16|q8_0|q4_0     # needs gguf
    python checkpoints.py openvino FOLDER FOLDER bf16|int8    # needs optimum-intel and nncf

Prints ``{}`` when it is done. The output has its name only then, so that an interrupted run leaves nothing to load.
Imports nothing of Quire.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    command, source, target, setting = sys.argv[1:]
    # The library may print to stdout: reserve stdout for the answer and redirect the library's prints to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    partial = Path(f"{target}.part")
    partial.parent.mkdir(parents=True, exist_ok=True)
    {"write": write_random, "gguf": write_gguf, "openvino": write_openvino}[command](Path(source), partial, setting)
    partial.rename(target)
    print("{}", file=answers, flush=True)


def write_random(config_path: Path, folder: Path, seed: str) -> None:
    import torch
    import transformers

    fields = json.loads(config_path.read_text(encoding="utf-8"))
    torch.manual_seed(int(seed))
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def write_openvino(source: Path, folder: Path, weights: str) -> None:
    """``int8``: NNCF's compression of weights, asymmetric with a scale for each output. The embedding too."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        source.resolve(), export=True, compile=False, load_in_8bit=weights == "int8", local_files_only=True
    )
    model.save_pretrained(folder)


def write_gguf(source: Path, file: Path, weights: str) -> None:
    """Write matrices in one type and vectors in F32, without a tokenizer.

    Beside Q4_0, the embedding and the output head are Q8_0: llama.cpp's own converter gives them more bits too.
    """
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}.get(
        config["model_type"]
    )
    if arch is None or rope.get("rope_type", "default") != "default":
        raise ValueError("only llama, qwen2 and qwen3 without scaled rope are converted: pass a GGUF file as MODEL")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights.upper()}"])
    names = gguf.get_tensor_name_map(arch, layers)
    for full, values in stored_tensors(source):
        name = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if name is None or (name == "output.weight" and config.get("tie_word_embeddings")):
            continue
        if arch == gguf.MODEL_ARCH.LLAMA and full.endswith(("q_proj.weight", "k_proj.weight")):
            # Neighbouring rows are rotated together, not the halves of a head.
            pairs = values.reshape(-1, 2, head_dim // 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        wide = weights == "q4_0" and name in ("token_embd.weight", "output.weight")
        kind = "F32" if values.ndim == 1 else "Q8_0" if wide else weights.upper()
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and float32 arrays of safetensors files in bfloat16, float16 or float32, without torch."""
    import numpy as np

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("the checkpoint has no safetensors files")
    for file in files:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        header.pop("__metadata__", None)
        for name, place in header.items():
            start, stop = place["data_offsets"]
            stored = data[start:stop]
            if place["dtype"] == "BF16":
                values = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = stored.view({"F16": np.float16, "F32": np.float32}[place["dtype"]]).astype(np.float32)
            yield name, values.reshape(place["shape"])


if __name__ == "__main__":
    main()
