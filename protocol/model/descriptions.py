"""The texts that describe a checkpoint: files of its folder, or made from the header of a GGUF file."""

from pathlib import Path

from quire.protocol.model.gguf_file import is_gguf, read_gguf
from quire.protocol.model.gguf_tokenizer import tokenizer_config, tokenizer_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
NO_TOKENIZER = "no_vocab"
"""What a GGUF file that has weights only declares as its tokenizer."""


def read_description(model: Path, name: str) -> str | None:
    """Return the text of a checkpoint's file, or None if it has no such file.

    Raises:
        OSError, ValueError: the file cannot be read as text.
        ConfigError: the GGUF file is damaged, or its tokenizer is not supported.
    """
    if not is_gguf(model):
        path = model / name
        return path.read_text(encoding="utf-8") if path.is_file() else None
    makers = {TOKENIZER: tokenizer_json, TOKENIZER_CONFIG: tokenizer_config}
    if name not in makers:
        return None
    file = read_gguf(model)
    return None if file.settings.get("tokenizer.ggml.model") == NO_TOKENIZER else makers[name](file)
