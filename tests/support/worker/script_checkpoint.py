"""Script checkpoints: real models whose greedy continuation of a conversation is a given text.

A script is a list of answers. The chat template counts the answers that a conversation already has, and ends the prompt
with the token that begins the next one. From there each token has one successor: the embedding of a token is the code
of the token that follows it, the head holds every token's own code, and the single layer adds nothing. So the model is
a table, exact in every dtype, and everything around it is the real engine: prompts, blocks, drafts, recovery, text.

A text is cut into pieces of which no two are equal, because a token has one successor. ``seed`` changes the cuts, and
so the places where a marker such as ``<tool_call>`` is split among tokens.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

END = "<|end|>"
WIDTH = 128
LONGEST_START = 4
"""Pieces begin with a random length of at most this many characters, and grow until they are new."""

Scripts = Sequence[str] | Mapping[str, Sequence[str]]


def make_script_checkpoint(
    folder: Path,
    scripts: Scripts,
    *,
    seed: int = 0,
    max_model_len: int = 8192,
    tokenizer_config: Mapping[str, Any] = {},
) -> list[int]:
    """Write a checkpoint that gives the answers of a script one after the other, then empty ones.

    Args:
        scripts: the answers of one script; or several scripts by a word, of which the first one is played whose word
            occurs in the conversation.
        seed: of the cuts into tokens.
        tokenizer_config: further fields of tokenizer_config.json, such as another ``chat_template``, which must write
            ``begin_token(script, answer)`` as the prompt's last token.

    Returns:
        Number of tokens of each answer, without its end token, script by script.
    """
    by_word = dict(scripts) if isinstance(scripts, Mapping) else {"": scripts}
    answers = [answer for script in by_word.values() for answer in script]
    pieces = _cut(answers, seed)
    begins = [begin_token(index, i) for index, script in enumerate(by_word.values()) for i in range(len(script))]
    specials = [END, *begins, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    alphabet = _byte_alphabet()
    words = [*alphabet.values()]
    words += (_as_bytes(piece, alphabet) for parts in pieces.values() for piece in parts)
    words = [*specials, *dict.fromkeys(words)]
    ids = {word: index for index, word in enumerate(words)}
    follows = np.full(len(words), ids[END])
    for begin, answer in zip(begins, answers, strict=True):
        chain = [ids[begin], *(ids[_as_bytes(piece, alphabet)] for piece in pieces[answer]), ids[END]]
        follows[chain[:-1]] = chain[1:]
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(folder, follows, ids[END], max_model_len)
    _write_tokenizer(folder, ids, specials)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": _template(by_word)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(tokenizer_config)))
    return [len(pieces[answer]) for answer in answers]


def begin_token(script: int, answer: int) -> str:
    """Return the special token that begins an answer; both are counted from 0."""
    return f"<|script_{script}_{answer}|>"


def _cut(answers: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Cut each text into pieces, such that no piece occurs twice in all texts together.

    Shorter texts are cut first: a text that is left as one piece is then at least as long as every earlier piece.
    """
    used: set[str] = set()
    found: dict[str, list[str]] = {}
    rng = random.Random(seed)
    for text in sorted(set(answers), key=lambda text: (len(text), text)):
        found[text] = parts = []
        at = 0
        while at < len(text):
            size = rng.randint(1, LONGEST_START)
            while text[at : at + size] in used and at + size < len(text):
                size += 1
            parts.append(text[at : at + size])
            used.add(parts[-1])
            at += size
        # The last piece may be an old one: it is joined to the piece before, until the result is new.
        while len(parts) > 1 and _is_old(parts[-1], parts[:-1], found, text):
            parts[-2:] = [parts[-2] + parts[-1]]
        used.update(parts)
    return found


def _is_old(piece: str, before: Sequence[str], found: Mapping[str, list[str]], text: str) -> bool:
    return piece in before or any(piece in parts for other, parts in found.items() if other != text)


def _byte_alphabet() -> dict[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _as_bytes(text: str, alphabet: Mapping[int, str]) -> str:
    return "".join(alphabet[byte] for byte in text.encode())


def _write_model(folder: Path, follows: np.ndarray, end: int, max_model_len: int) -> None:
    size = len(follows)
    codes = np.random.default_rng(0).choice(np.float32([-1, 1]), (size, WIDTH))
    tensors = {"model.embed_tokens.weight": codes[follows], "lm_head.weight": codes}
    layer = "model.layers.0."
    tensors |= {f"{name}.weight": np.ones(WIDTH, np.float32) for name in _norms(layer)}
    half = WIDTH // 2
    shapes = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH), "mlp.down_proj": (WIDTH, half)}
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), (half, WIDTH))
    tensors |= {f"{layer}{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": size,
        "hidden_size": WIDTH,
        "intermediate_size": half,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": WIDTH // 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _norms(layer: str) -> Iterator[str]:
    yield "model.norm"
    yield from (f"{layer}{name}" for name in ("input_layernorm", "post_attention_layernorm"))


def _write_tokenizer(folder: Path, ids: Mapping[str, int], specials: Sequence[str]) -> None:
    """Write a byte-level tokenizer. It has no merges, so that prompts become bytes, and only answers have pieces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(ids), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))


def _template(by_word: Mapping[str, Sequence[str]]) -> str:
    """Write the chat template: messages with their tool calls, then the token that begins the next answer."""
    chosen = ""
    for index, (word, script) in enumerate(by_word.items()):
        begins = "".join(
            f"{{% {'if' if i == 0 else 'elif'} state.answers == {i} %}}{begin_token(index, i)}"
            for i in range(len(script))
        )
        condition = f"{json.dumps(word)} in state.text"
        chosen += f"{{% {'if' if index == 0 else 'elif'} {condition} %}}{begins}{{% endif %}}" if script else ""
    return (
        "{% set state = namespace(answers=0, last='', text='') %}"
        "{% if tools %}<|system|>Tools: {{ tools | tojson }}{% endif %}"
        "{% for message in messages %}"
        "{% if message.role == 'assistant' and state.last != 'assistant' %}"
        "{% set state.answers = state.answers + 1 %}{% endif %}"
        "{% set state.last = message.role %}"
        "{% if message.role == 'assistant' %}<|assistant|>{% elif message.role == 'tool' %}<|tool|>"
        "{% elif message.role == 'user' %}<|user|>{% else %}<|system|>{% endif %}"
        "{% set content = message.content if message.content is string else (message.content or '') | tojson %}"
        "{{ content }}{% set state.text = state.text + content %}"
        "{% for call in message.tool_calls or [] %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}<|assistant|>{chosen}{{% endif %}}{{% endif %}}"
    )
