"""``quire check``: what a checkpoint can do, and what its files lose of requests. Loads no weights."""

import argparse
import json
import re
import sys
from contextlib import closing
from math import prod
from typing import Any

from quire.frontend.serve_options import ServeOptions
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.probe import ANSWER_TEXT, Probe, probe
from quire.frontend.text.text_in import NO_TEMPLATE, TextIn
from quire.frontend.text.thinking import Thinking, answer_format
from quire.launch.config.command_line import read_options
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError, QuireError
from quire.protocol.model.checkpoint import DTYPE_BYTES, stored_tensors
from quire.protocol.model.descriptions import TOKENIZER, has_tokenizer, other_tokenizer, why_no_tokenizer
from quire.protocol.model.gguf_file import is_gguf
from quire.protocol.request.structured_outputs import KINDS

TAG = re.compile(r"<[|｜][^<>\s]+>|<[^<>\s]+[|｜]>|<(?:start|end)_of_turn>")
"""What a chat template writes that is usually one token."""


def run(args: argparse.Namespace) -> None:
    """Print what a checkpoint can do. Exit with status 1 if it cannot be served, or if requests lose something."""
    try:
        facts, losses, notes = _examine(*read_options(args))
    except ConfigError as error:
        raise QuireError(str(error)) from None  # has the status 1
    if args.json:
        print(json.dumps({**facts, "notes": notes, "losses": losses}, ensure_ascii=False))
    else:
        rows = [(name.replace("_", " "), value) for name, value in facts.items()]
        for name, value in [*rows, *(("note", text) for text in notes), *(("lost", text) for text in losses)]:
            text = f"{value:,}" if isinstance(value, int) else ", ".join(value) if isinstance(value, list) else value
            print(f"{name:<18}{text or 'none'}")
    sys.exit(1 if losses else 0)


def _examine(engine: EngineOptions, options: ServeOptions) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return facts by name, what is lost, and what the checkpoint leaves out by design."""
    folder = find_model(engine.model)
    config = make_engine_config(engine, folder=folder)
    model, tensors = config.model, stored_tensors(folder, renamed=config.model.transformers is None).values()
    with closing(TextIn.load(folder, config.chat_template) if has_tokenizer(folder) else TextIn()) as text_in:
        tokenizer, thinking = text_in.tokenizer, Thinking.of(config, text_in)
        form = answer_format(thinking, options, text_in)
        found = Probe([], [NO_TEMPLATE] * (model.generates and tokenizer is not None))
        if model.generates and tokenizer is not None and text_in.template is not None:
            found = probe(text_in, form)
    vocab = {} if tokenizer is None else tokenizer.get_vocab()
    losses, notes = [*found.losses] if vocab else [why_no_tokenizer(folder)], [*found.notes]
    if beyond := [token for token, token_id in vocab.items() if token_id >= model.vocab_size]:
        losses.append(f"{len(beyond)} tokens of the tokenizer are beyond the model's vocabulary, such as {beyond[0]!r}")
    for tag in dict.fromkeys(TAG.findall(found.rendered)):
        if tag not in vocab:  # some models were trained so, but not without an end
            ends_answers = f"{ANSWER_TEXT}{tag}" in found.rendered
            text = f"the tokenizer has no token {tag}, which the chat template writes"
            (losses if ends_answers else notes).append(text + " after an answer" * ends_answers)
    file = folder.name if is_gguf(folder) else other_tokenizer(folder) or TOKENIZER
    packed = not all(tensor.gguf or tensor.dtype in DTYPE_BYTES for tensor in tensors)
    ends = {token: text_in.decode([token], skip_special_tokens=False) for token in model.eos_token_ids}
    facts: dict[str, Any] = {
        "checkpoint": str(folder),
        "architecture": model.architecture,
        "implementation": model.implementation,
        "parameters": "packed" if packed else sum(prod(tensor.shape) for tensor in tensors),
        "weight_bytes": sum(tensor.num_bytes for tensor in tensors),
        "weights": sorted({tensor.gguf.kind if tensor.gguf else tensor.dtype for tensor in tensors}),
        "quantisation": model.weight_format and f"{model.weight_format.layout} {model.weight_format.kind}",
        "context": config.max_model_len,
        "vocabulary": model.vocab_size,
        "tasks": Capabilities(model.generates, model.pooling).tasks,
        "tokenizer": tokenizer and f"{file}, {type(tokenizer.model).__name__}, {len(vocab)} tokens",
        "end_tokens": [f"{token} {text}".rstrip() for token, text in ends.items()],
        "chat_template": text_in.template and text_in.template.where.rpartition("/")[2],
        "roles": found.roles,
        "tools": form and form.whole.has_calls and f"{form.name}, {'' if found.reads_calls else 'not '}read back",
        "thoughts": list(thinking.markers or ()) or (form.name if form and form.has_thoughts else None),
        "images": model.vision and f"read by {model.vision.architecture}",
        "structured_output": [*KINDS[:-1], "json_object"] if model.generates and vocab else [],
    }
    return facts, losses, notes
