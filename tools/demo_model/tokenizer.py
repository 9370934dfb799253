"""The demo model's byte-level BPE tokenizer, its ChatML template, and documents as weighted token sequences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from corpus import HIGHEST, Document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
VOCABULARY_SIZE = 1024
CONTEXT_LENGTH = 2048
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'Call: <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NUMBER_REPEATS = 2000
"""Repetitions of each number in the training text, so that it becomes a single token, with and without a leading space.
"""
PROMPT_WEIGHT = 0.0
"""Loss weight of tokens that the model does not generate itself."""


@dataclass(frozen=True)
class Sample:
    """A document's tokens with the loss weight of each."""

    tokens: list[int]
    weights: list[float]


def train_tokenizer(corpus: Iterable[Document]) -> Tokenizer:
    """Train a byte-level BPE; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    numbers = [f"{value} {value}" for value in range(HIGHEST + 1)] * NUMBER_REPEATS
    texts = (f"{turn.role}\n{turn.text}" for document in corpus for turn in document)
    tokenizer.train_from_iterator(chain(texts, numbers), trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, corpus: Sequence[Document]) -> list[Sample]:
    """Tokenize the documents with the chat template, each with the end-of-text token at its end."""
    heads = {role: [IM_START_ID, *tokenizer.encode(f"{role}\n").ids] for role in ("system", "user", "assistant")}
    newline: list[int] = tokenizer.encode("\n").ids
    texts = iter(tokenizer.encode_batch([turn.text for document in corpus for turn in document]))
    samples: list[Sample] = []
    for document in corpus:
        tokens: list[int] = []
        weights: list[float] = []
        for turn in document:
            body: list[int] = next(texts).ids
            if turn.role == "raw":
                tokens += body
                weights += [1.0] * len(body)
                continue
            head = heads[turn.role]
            weight = 1.0 if turn.role == "assistant" else PROMPT_WEIGHT
            tokens += [*head, *body, IM_END_ID, *newline]
            weights += [PROMPT_WEIGHT] * len(head) + [weight] * (len(body) + 1) + [PROMPT_WEIGHT] * len(newline)
        end_weight = 1.0 if document[0].role == "raw" else PROMPT_WEIGHT
        samples.append(Sample([*tokens, END_OF_TEXT_ID], [*weights, end_weight]))
    return samples


def encode_prompt(tokenizer: Tokenizer, prompt: Document) -> list[int]:
    """Tokenize a raw text, or a chat up to the start of the assistant's answer."""
    if prompt[0].role == "raw":
        return list(tokenizer.encode(prompt[0].text).ids)
    text = "".join(f"{IM_START}{turn.role}\n{turn.text}{IM_END}\n" for turn in prompt)
    return list(tokenizer.encode(f"{text}{IM_START}assistant\n").ids)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer files of a Hugging Face model directory."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": CONTEXT_LENGTH,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": END_OF_TEXT,
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for number, token in enumerate((END_OF_TEXT, IM_START, IM_END))
        },
    }
    special = {"bos_token": END_OF_TEXT, "eos_token": IM_END, "pad_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
