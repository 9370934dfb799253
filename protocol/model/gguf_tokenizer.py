"""The tokenizer of a GGUF file, written as ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds are read: byte-level BPE (``gpt2``), whose rule of splitting text has a name in ``tokenizer.ggml.pre``, and
SentencePiece BPE (``llama``), which has scores in place of merges.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.protocol.errors import ConfigError, printable
from quire.protocol.model.gguf_file import GgufArray, GgufFile

_UNKNOWN, _CONTROL, _ADDED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_SINGLE_DIGITS = ("smollm",)
_PLAIN = ("gpt-2", "default")
_NFC = ("qwen2",)
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Rules of Llama 3, whose tokenizer takes a word that is a token without merging, and adds the first token."""


def tokenizer_json(file: GgufFile) -> str:
    """Return the text of ``tokenizer.json``.

    Raises:
        ConfigError: a list is missing or of the wrong length, or the kind is not supported.
    """
    tokens, kinds = _tokens(file)
    kind = file.settings.get(f"{_PREFIX}model")
    if kind == "gpt2":
        parts = _byte_level(file, tokens)
    elif kind == "llama":
        parts = _sentence_piece(file, tokens, kinds)
    else:
        raise ConfigError(f"{file.path}: {_PREFIX}model {printable(kind)} is not supported; supported: gpt2, llama")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": index, "content": text, "special": kinds[index] != _ADDED, **flags}
        for text, index in _added(tokens, kinds)
    ]
    processors = _begin(file, tokens)
    if kind == "gpt2":
        processors.insert(0, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True})
    post = {"type": "Sequence", "processors": processors} if processors else None
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": post}
    return json.dumps(whole | parts, ensure_ascii=False)


def added_tokens(file: GgufFile) -> dict[str, int]:
    """Return the ids of the tokens that are never parts of other text, by text.

    Raises:
        ConfigError: as ``tokenizer_json``.
    """
    return dict(_added(*_tokens(file)))


def tokenizer_config(file: GgufFile) -> str:
    """Return the text of ``tokenizer_config.json``: the chat template and the special tokens that it may name."""
    tokens, _ = _tokens(file)
    config: dict[str, Any] = {}
    template = file.settings.get("tokenizer.chat_template")
    if isinstance(template, GgufArray):
        raise ConfigError(f"{file.path}: tokenizer.chat_template must be a text of at most 1 MiB")
    if isinstance(template, str):
        config["chat_template"] = template
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _special(file, key, len(tokens))
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    return json.dumps(config)


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = _array(file, "tokens", str)
    kinds = _array(file, "token_type", int) if f"{_PREFIX}token_type" in file.settings else [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: {_PREFIX}token_type has {len(kinds)} values for {len(tokens)} tokens")
    return tokens, kinds


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, int]]:
    numbered = enumerate(zip(tokens, kinds, strict=True))
    return [(text, index) for index, (text, kind) in numbered if kind in (_UNKNOWN, _CONTROL, _ADDED) and text]


def _array(file: GgufFile, key: str, kind: type | tuple[type, ...]) -> list[Any]:
    value = file.settings.get(f"{_PREFIX}{key}")
    values = value.values() if isinstance(value, GgufArray) else []
    if not values or not isinstance(values[0], kind):
        raise ConfigError(f"{file.path}: {_PREFIX}{key} is missing, empty or of a wrong type")
    return values


def _special(file: GgufFile, key: str, num_tokens: int) -> int | None:
    value = file.settings.get(f"{_PREFIX}{key}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
        raise ConfigError(f"{file.path}: {_PREFIX}{key}_token_id must be below {num_tokens} (got {printable(value)})")
    return value


def _begin(file: GgufFile, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Return the processor that puts the first token before a prompt, if the file asks for it."""
    kind, pre = file.settings.get(f"{_PREFIX}model"), file.settings.get(f"{_PREFIX}pre")
    wanted = file.settings.get(f"{_PREFIX}add_bos_token", kind == "llama" or pre in _WHOLE_WORDS)
    bos = _special(file, "bos", len(tokens))
    if not wanted or bos is None:
        return []
    first = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    pieces = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    special = {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}}
    pair = [first, pieces[0], pieces[1]]
    return [{"type": "TemplateProcessing", "single": [first, pieces[0]], "pair": pair, "special_tokens": special}]


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    pre = file.settings.get(f"{_PREFIX}pre", "default")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre not in _SPLITS}
    first: list[dict[str, Any]] = []
    if pre in _SPLITS:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        first = [split]
    elif pre in _SINGLE_DIGITS:
        first = [{"type": "Digits", "individual_digits": True}]
    elif pre not in _PLAIN:
        known = ", ".join([*_SPLITS, *_SINGLE_DIGITS, *_PLAIN])
        raise ConfigError(f"{file.path}: {_PREFIX}pre {printable(pre)} is not supported; supported: {known}")
    merges = [merge.split(" ") for merge in _array(file, "merges", str)]
    if any(len(pair) != 2 for pair in merges):
        raise ConfigError(f"{file.path}: {_PREFIX}merges must have two parts each")
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, level]},
        "decoder": level | {"use_regex": True},
        "model": _bpe(_vocab(tokens), merges) | {"ignore_merges": pre in _WHOLE_WORDS},
    }


def _sentence_piece(file: GgufFile, tokens: Sequence[str], kinds: list[int]) -> dict[str, Any]:
    scores = _array(file, "scores", (float, int))
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: {_PREFIX}scores has {len(scores)} values for {len(tokens)} tokens")
    if str(file.settings.get("general.architecture")).startswith("gemma"):
        # Runs of spaces are tokens as others are; the order of the tokens is the order of the merges.
        spaces = [bool(text) and not text.strip(" ") for text in tokens]
        tokens = [_SPACE * len(text) if blank else text for text, blank in zip(tokens, spaces, strict=True)]
        kinds[:] = [1 if blank else kind for kind, blank in zip(kinds, spaces, strict=True)]
        scores = [-index for index in range(len(tokens))]
    has_prefix = bool(file.settings.get(f"{_PREFIX}add_space_prefix", True))
    spaces_out = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    spaces_in = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces_in] if has_prefix else [spaces_in]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = _special(file, "unknown", len(tokens))
    model = _bpe(_vocab(tokens), _merges(tokens, kinds, scores)) | {"byte_fallback": True, "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [spaces_out, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": model | {"unk_token": None if unknown is None else tokens[unknown]},
    }


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids by text. A repeated text, which some files have as padding, keeps its first id."""
    return {text: index for index, text in reversed(list(enumerate(tokens)))}


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """Return all pairs of tokens that join to a token, the highest score first."""
    ids = {text: index for text, index in _vocab(tokens).items() if kinds[index] not in (_UNKNOWN, _CONTROL, _BYTE)}
    found = []
    for text, index in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(found)]


def _bpe(vocab: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocab, "merges": merges, "dropout": None, "unk_token": None}
