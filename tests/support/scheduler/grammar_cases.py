"""The demo model's vocabulary, and texts stepped through grammars by hand."""

from functools import cache, lru_cache
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.config import EngineConfig
from quire.protocol.model.model_config import load_model_config
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.scheduler_proc.structured.llguidance_backend import LLGuidanceBackend

DEMO = DEMO_MODEL
VOCAB_SIZE = 1024
EOS = [0, 2]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@cache
def demo_backend() -> LLGuidanceBackend:
    return LLGuidanceBackend((DEMO / "tokenizer.json").read_text(encoding="utf-8"), VOCAB_SIZE, EOS)


def demo_config(**settings: Any) -> EngineConfig:
    return EngineConfig(model=load_model_config(DEMO), model_path=str(DEMO), max_model_len=512, **settings)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def text_of(tokens: list[int]) -> str:
    text: str = tokenizer().decode([token for token in tokens if token not in EOS])
    return text


def allowed(backend: Any, matcher: Any) -> set[int]:
    """Return the allowed next tokens."""
    masks = np.full((1, VOCAB_SIZE // 32), -1, np.int32)
    backend.fill([(matcher, 0)], masks)
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


@lru_cache(maxsize=16)
def _compiled(wanted: bytes) -> Any:
    return demo_backend().compile(msgspec.msgpack.decode(wanted, type=StructuredOutputs))


def fits(text: str, **wanted: Any) -> bool:
    """Return whether the masks allow exactly ``text``: each of its tokens, and then the end."""
    backend = demo_backend()
    matcher = _compiled(msgspec.msgpack.encode(StructuredOutputs(**wanted))).matcher()
    for token in tokens_of(text):
        if token not in allowed(backend, matcher) or not matcher.accept(token):
            return False
    return set(EOS) <= allowed(backend, matcher)
