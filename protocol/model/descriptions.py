"""The texts that describe a checkpoint: files of its folder, or made from other files or the header of a GGUF file."""

import importlib.util
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.model.gguf_file import is_gguf, read_gguf
from quire.protocol.model.gguf_tokenizer import tokenizer_config, tokenizer_json
from quire.version import install_command

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
NO_TOKENIZER = "no_vocab"
"""What a GGUF file that has weights only declares as its tokenizer."""
OTHER_TOKENIZERS = (
    *("tekken.json", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model", "tiktoken.model"),
    *("vocab.json", "vocab.txt"),
)
"""Files in place of tokenizer.json, which transformers converts."""
CONVERT_SECONDS = 300
_CONVERT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # end with the parent
os.environ["HF_HUB_OFFLINE"] = "1"
sys.modules["torch"] = None  # twice as fast without it
from tokenizers import processors
from transformers import AutoTokenizer
options = {"trust_remote_code": False, "local_files_only": True, "mistral_format": False}
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], **options).backend_tokenizer
if sys.argv[2] == "tekken.json":  # mistral_common puts this token before a prompt
    first = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=first)
sys.stdout.buffer.write(tokenizer.to_str().encode())
"""


class AddedToken(msgspec.Struct, frozen=True):
    """A token of ``added_tokens`` in tokenizer.json, or of ``added_tokens_decoder`` in tokenizer_config.json."""

    content: str
    id: int = -1
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class AddedTokens(msgspec.Struct):
    """The parts of both files that list single tokens. Decoding only these is fast."""

    added_tokens: list[AddedToken] = []
    added_tokens_decoder: dict[int, AddedToken] = {}


def other_tokenizer(folder: Path) -> str:
    """Return the name of the file that describes the tokenizer of a folder without tokenizer.json, or ""."""
    names = () if (folder / TOKENIZER).is_file() else OTHER_TOKENIZERS
    return next((name for name in names if (folder / name).is_file()), "")


def has_tokenizer(model: Path) -> bool:
    """Whether ``read_description`` finds a tokenizer, if its files are valid."""
    other = other_tokenizer(model)
    needed = ("transformers", "sentencepiece") if other.endswith(".model") else ("transformers",)
    return is_gguf(model) or (model / TOKENIZER).is_file() or (other != "" and all(map(_is_installed, needed)))


def why_no_tokenizer(model: Path) -> str:
    """Return why ``read_description`` finds no tokenizer, and what to do, in one line."""
    other = "" if is_gguf(model) else other_tokenizer(model)
    has = f"has {other} but no {TOKENIZER}; {install_command('tokenizers')} converts it" if other else "has none"
    return f"no tokenizer: {model} {has}. Prompts must be token ids, and answers have no text"


def read_description(model: Path, name: str) -> str | None:
    """Return the text of a checkpoint's file, or None if it has no such file.

    A tokenizer has the tokens that tokenizer_config.json adds to it, with the ids that transformers gives them.

    Raises:
        OSError, ValueError: the file cannot be read as text.
        ConfigError: the GGUF file is damaged, or the tokenizer is not supported or cannot be converted.
    """
    if not is_gguf(model):
        path = model / name
        if name != TOKENIZER or not has_tokenizer(model):
            return path.read_text(encoding="utf-8") if path.is_file() else None
        text = path.read_text(encoding="utf-8") if path.is_file() else _converted(model, other_tokenizer(model))
        return _with_added(text, read_description(model, TOKENIZER_CONFIG) or "{}")
    makers = {TOKENIZER: tokenizer_json, TOKENIZER_CONFIG: tokenizer_config}
    if name not in makers:
        return None
    file = read_gguf(model)
    return None if file.settings.get("tokenizer.ggml.model") == NO_TOKENIZER else makers[name](file)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@lru_cache(maxsize=1)
def _converted(folder: Path, name: str) -> str:
    """Convert in a process of its own, as transformers takes seconds to import. No code of the checkpoint runs."""
    command = [sys.executable, "-P", "-c", _CONVERT, str(folder), name]
    try:
        return subprocess.run(command, capture_output=True, timeout=CONVERT_SECONDS, check=True).stdout.decode()
    except (OSError, ValueError, subprocess.SubprocessError):
        raise ConfigError(f"{folder / name}: transformers cannot convert it to {TOKENIZER}") from None


def _with_added(text: str, config: str) -> str:
    try:
        listed = msgspec.json.decode(config, type=AddedTokens).added_tokens_decoder
        found = msgspec.json.decode(text, type=AddedTokens).added_tokens if listed else []
    except (msgspec.MsgspecError, RecursionError):  # reported by the readers of these files
        return text
    known = {msgspec.structs.replace(token, id=-1) for token in found}
    missing = [token for _, token in sorted(listed.items()) if token not in known]
    if not missing:
        return text
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(text)
    flags = ({name: getattr(token, name) for name in token.__struct_fields__ if name != "id"} for token in missing)
    tokenizer.add_tokens([tokenizers.AddedToken(**each) for each in flags])
    whole: str = tokenizer.to_str()
    return whole
