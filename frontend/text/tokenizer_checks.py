"""Checks of a checkpoint's tokenizer before it is used: the file may describe any program of text replacements."""

import resource
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from quire.protocol.errors import ConfigError, printable

MAX_TOKEN_ID = 2**22 - 1
"""The library allocates an entry for each id up to the highest. Large vocabularies have some 260,000."""
TRIAL_SECONDS = 5.0
"""Time limit of the trial, which takes some 5 ms with a usual tokenizer."""
CHECK_SECONDS = 0.02
TRIAL_BYTES = 2**30
"""Limit of the memory that the trial takes."""
_WORDS = "The quick brown fox jumps over the lazy dog. ÀÉß 你好 🙂 (1 + 2) * 345 == 1035;\n\tif x: return 'y'\n"
PROBES = (*dict.fromkeys(_WORDS), *(char * 64 for char in dict.fromkeys(_WORDS)), _WORDS, _WORDS * 16)
"""Texts of the trial, the shortest first."""
NUM_DECODED = 1000
"""Number of tokens, spread over the vocabulary, that the trial decodes one by one."""


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct):
    model: _Model


def check_token_ids(text: str, path: Path) -> None:
    """Raise ConfigError if an id in a ``tokenizer.json`` would take too much memory."""
    try:
        vocab = msgspec.json.decode(text, type=_TokenizerFile).model.vocab
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        raise ConfigError(f"{path}: cannot be read as a tokenizer") from None
    if isinstance(vocab, dict) and vocab and (highest := max(vocab.values())) > MAX_TOKEN_ID:
        token = next(token for token, token_id in vocab.items() if token_id == highest)
        raise ConfigError(
            f"{path}: token ids must be between 0 and {MAX_TOKEN_ID} (got {highest} for {printable(token)})"
        )


def check_speed(tokenizer: Tokenizer, path: Path) -> None:
    """Raise ConfigError if the tokenizer needs very long or much memory for ordinary texts.

    The trial runs in a thread that is abandoned then; it does not hold the interpreter lock.
    """
    abandoned = threading.Event()
    trial = threading.Thread(target=_try_out, args=(tokenizer, abandoned), name="tokenizer trial", daemon=True)
    most_bytes = _max_resident_bytes() + TRIAL_BYTES
    deadline = time.monotonic() + TRIAL_SECONDS
    trial.start()
    while trial.is_alive():
        trial.join(CHECK_SECONDS)
        if trial.is_alive() and (time.monotonic() > deadline or _max_resident_bytes() > most_bytes):
            abandoned.set()
            raise ConfigError(
                f"{path}: the tokenizer needs more than {TRIAL_SECONDS:g} s or {TRIAL_BYTES >> 30} GiB for a page of "
                "ordinary text: use another one"
            )


def _max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _try_out(tokenizer: Tokenizer, abandoned: threading.Event) -> None:
    try:
        for probe in PROBES:
            if abandoned.is_set():
                return
            (encoding,) = tokenizer.encode_batch_fast([probe])
            tokenizer.decode_batch([encoding.ids])
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        tokenizer.decode_batch([[token] for token in range(0, size, max(1, size // NUM_DECODED))])
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic, which a request with this text reports
        return
