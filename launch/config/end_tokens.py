"""The tokens that end an answer: beside those of the model's configuration, the tokenizer's and the chat template's."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

from quire.launch.config.sampling_options import added_token_ids
from quire.protocol.errors import QuireError
from quire.protocol.model.descriptions import TOKENIZER, TOKENIZER_CONFIG, read_description
from quire.protocol.model.model_config import ModelConfig

_ANSWER = "ANSWER"
MAX_CHARS = 2**16


class _Named(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | _Named | None = None


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _VocabularyFile(msgspec.Struct):
    model: _Vocabulary


def with_end_tokens(model: ModelConfig, folder: Path | None, chat_template: str) -> ModelConfig:
    """Return the model with the tokenizer's ``eos_token``, and the token that its chat template writes after an answer.

    The files of fine-tuned models often disagree, and the model was trained with the token that one of them names.

    Args:
        chat_template: source of a template that replaces the checkpoint's.
    """
    if folder is None or not model.generates:
        return model
    try:
        found = _end_tokens(folder, chat_template)
    except (QuireError, OSError, ValueError, RecursionError):
        return model  # the tokenizer's loader reports what is wrong
    ids = {token_id for token_id in found if 0 <= token_id < model.vocab_size}
    return msgspec.structs.replace(model, eos_token_ids=sorted(ids.union(model.eos_token_ids)))


def _end_tokens(folder: Path, chat_template: str) -> list[int]:
    config = msgspec.json.decode(read_description(folder, TOKENIZER_CONFIG) or "{}", type=_TokenizerConfig)
    ids = added_token_ids(folder)
    eos = config.eos_token.content if isinstance(config.eos_token, _Named) else config.eos_token
    if eos is not None and eos not in ids:
        ids |= _vocabulary_id(folder, eos)
    return [ids[text] for text in (eos, _end_of_turn(folder, chat_template, ids)) if text in ids]


def _vocabulary_id(folder: Path, text: str) -> dict[str, int]:
    vocab = msgspec.json.decode(read_description(folder, TOKENIZER) or "{}", type=_VocabularyFile).model.vocab
    named = vocab.items() if isinstance(vocab, dict) else ((piece, index) for index, (piece, _) in enumerate(vocab))
    return {piece: index for piece, index in named if piece == text}


def _end_of_turn(folder: Path, chat_template: str, added: Iterable[str]) -> str | None:
    """Return the token that the chat template writes behind an answer, blanks aside; None if there is none.

    A token with text or another token right behind it closes only a part of the answer, such as its thoughts.
    """
    from quire.frontend.text.chat_template import Conversation
    from quire.frontend.text.template_files import load_template
    from quire.frontend.text.text_in import read_config

    turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        template = load_template(folder, read_config(folder), chat_template)
        if template is None:
            return None
        with closing(template):
            ended = Conversation(messages=turns, add_generation_prompt=False, max_chars=MAX_CHARS)
            text = template.render(ended)
    except QuireError:  # it is broken, or refuses an answer
        return None
    after = text.rpartition(_ANSWER)[2].lstrip()
    token = max((token for token in added if token.strip() and after.startswith(token)), key=len, default="")
    return token if after[len(token) :][:1].strip() == "" else None
