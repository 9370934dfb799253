"""Builds the demo model: corpus, tokenizer, training, self-check and the Hugging Face directory.

    python -P tools/demo_model/build.py --out DIR [--start DIR] [--seed 0] [--documents 60000] [--threads 2]

On a busy machine, one thread is faster than two: threads that wait for each other at every operation lose most of their
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

import corpus
import tokenizer as tokens

if TYPE_CHECKING:
    from llama import Llama
    from tokenizers import Tokenizer

VALIDATION_DOCUMENTS, TOKENIZER_DOCUMENTS = 400, 20000
CONTINUED_RATE = 0.25
"""Factor on the learning rate when a finished model is trained further."""


def _log(line: str) -> None:
    print(line, flush=True)


def write_checkpoint(model: Llama, folder: Path) -> None:
    """Write the weights in bfloat16 and the two configuration files."""
    import torch
    from safetensors.torch import save_file

    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    ends = [tokens.END_OF_TEXT_ID, tokens.IM_END_ID]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(model.shape),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokens.END_OF_TEXT_ID,
        "eos_token_id": tokens.IM_END_ID,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": tokens.CONTEXT_LENGTH,
        "mlp_bias": False,
        "pad_token_id": tokens.END_OF_TEXT_ID,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    generation = {
        "bos_token_id": tokens.END_OF_TEXT_ID,
        "eos_token_id": ends,
        "pad_token_id": tokens.END_OF_TEXT_ID,
        "do_sample": True,
        "temperature": 0.7,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the whole directory; each file is replaced atomically, for servers that have it open."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        tokens.write_tokenizer(tokenizer, Path(name))
        write_checkpoint(model, Path(name))
        for file in sorted(Path(name).iterdir()):
            file.chmod(0o644)
            file.replace(folder / file.name)


def build(folder: Path, seed: int, documents: int, threads: int, start: Path | None) -> None:
    """Train a new model, or train the one in `start` further; write it and report its self-check."""
    import evaluate
    import torch
    import train
    from llama import Llama, Shape
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    training = list(corpus.documents(seed, documents))
    validation = list(corpus.documents(seed + 1, VALIDATION_DOCUMENTS))
    if start is None:
        tokenizer = tokens.train_tokenizer(training[:TOKENIZER_DOCUMENTS])
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    model = Llama(Shape(vocab_size=tokenizer.get_vocab_size()))
    if start is not None:
        model.load_state_dict(load_file(str(start / "model.safetensors")))
    batches = train.make_batches(tokens.encode_documents(tokenizer, training), seed)
    held_out = train.make_batches(tokens.encode_documents(tokenizer, validation), seed)
    _log(f"{sum(batch.tokens.numel() for batch in batches)} tokens in {len(batches)} batches, {threads} threads")
    checks = evaluate.checks()
    few = [*checks[:7], *checks[27:120:8], *(check for check in checks if check.kind == "story")]
    rate = 1.0 if start is None else CONTINUED_RATE
    done = train.train(model, batches, rate, _log, lambda model: evaluate.report(model, tokenizer, few, 0.0, _log))
    write_model(model, tokenizer, folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    loss = train.validation_loss(model, held_out)
    _log(
        f"{parameters} parameters, {(folder / 'model.safetensors').stat().st_size} bytes, {done.steps} steps, "
        f"{done.tokens} tokens, {done.seconds:.0f} s, validation loss {loss:.4f}"
    )
    for temperature in (0.0, 0.7):
        evaluate.report(model, tokenizer, checks, temperature, _log)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build Quire's demo model.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output directory")
    parser.add_argument("--start", type=Path, metavar="DIR", help="directory of a demo model to train further")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (0)")
    parser.add_argument(
        "--documents", type=int, default=60000, metavar="N", help="documents in the training corpus (60000)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads (2)")
    arguments = parser.parse_args()
    build(arguments.out, arguments.seed, arguments.documents, arguments.threads, arguments.start)


if __name__ == "__main__":
    main()
