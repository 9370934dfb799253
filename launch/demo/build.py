"""Builds the demo model: corpus, tokenizer, training and the Hugging Face folder.

    python -P -m quire.launch.demo.build --out DIR [--seed 0] [--minutes 13] [--threads 2]

On a machine that does other work, one thread is faster than two: threads that wait for each other at every operation
lose most of their time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from quire.launch.demo import corpus
from quire.launch.demo import tokenizer as tokens

if TYPE_CHECKING:
    from quire.launch.demo.llama import Llama, Shape

TRAINING_CHATS, LONG_CHATS, VALIDATION_CHATS = 72000, 1500, 400
TOKENIZER_CHATS = 20000


def _say(line: str) -> None:
    print(line, flush=True)


def write_checkpoint(model: Llama, shape: Shape, folder: Path) -> None:
    """The weights in bfloat16 and the two configuration files."""
    import torch
    from safetensors.torch import save_file

    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    ends = [tokens.END_OF_TEXT_ID, tokens.IM_END_ID]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **dataclasses.asdict(shape),
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": tokens.END_OF_TEXT_ID,
        "eos_token_id": tokens.IM_END_ID, "hidden_act": "silu", "initializer_range": 0.02,
        "max_position_embeddings": tokens.CONTEXT_LENGTH, "mlp_bias": False, "pad_token_id": tokens.END_OF_TEXT_ID,
        "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {"bos_token_id": tokens.END_OF_TEXT_ID, "eos_token_id": ends, "pad_token_id": tokens.END_OF_TEXT_ID,
                  "do_sample": True, "temperature": 0.7}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build(folder: Path, seed: int, minutes: float, threads: int) -> None:
    """Writes the whole model folder."""
    import torch

    from quire.launch.demo import train
    from quire.launch.demo.llama import Shape

    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    training = list(chain(corpus.documents(seed, TRAINING_CHATS), corpus.documents(seed + 1, LONG_CHATS, 12)))
    validation = list(corpus.documents(seed + 2, VALIDATION_CHATS))
    tokenizer = tokens.train_tokenizer(training[:TOKENIZER_CHATS])
    tokens.write_tokenizer(tokenizer, folder)
    batches = train.make_batches(tokens.encode_documents(tokenizer, training), seed)
    held_out = train.make_batches(tokens.encode_documents(tokenizer, validation), seed)
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    total = sum(batch.tokens.numel() for batch in batches)
    _say(f"{total} tokens in {len(batches)} batches, {torch.get_num_threads()} threads")
    result = train.train(batches, held_out, shape, minutes * 60, seed, _say)
    write_checkpoint(result.model, shape, folder)
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    _say(f"{parameters} parameters, {(folder / 'model.safetensors').stat().st_size} bytes, {result.steps} steps, "
         f"{result.tokens} tokens, {result.seconds:.0f} s, validation loss {result.validation_loss:.4f}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build Quire's demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=13.0, help="training time")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    build(arguments.out, arguments.seed, arguments.minutes, arguments.threads)


if __name__ == "__main__":
    main()
