"""Tokenizers of folders: tokens that tokenizer_config.json adds, and files that transformers converts."""

import base64
import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import ConfigError
from quire.protocol.model.descriptions import OTHER_TOKENIZERS, TOKENIZER, has_tokenizer, read_description

TEXTS = ["Hello world, 123 don't stop", " naïve é日本😀\t x", "a  b\n\n  c<|turn|><|endoftext|></s>"]
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def trained() -> Any:
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS * 20, vocab_size=300, show_progress=False)
    return made


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def added(*tokens: tuple[str, bool]) -> dict[str, Any]:
    return {str(300 + i): {"content": text, "special": special, **PLAIN} for i, (text, special) in enumerate(tokens)}


def test_added_tokens_of_the_configuration_count(tmp_path: Path) -> None:
    tokenizer = trained()._tokenizer
    tokenizer.add_special_tokens(["<|endoftext|>"])
    listed = added(("<|endoftext|>", True), ("<|turn|>", True), ("<tag>", False))
    write(tmp_path, tokenizer__json=tokenizer.to_str(), tokenizer_config__json={"added_tokens_decoder": listed})
    text_in, size = TextIn.load(tmp_path), tokenizer.get_vocab_size()
    assert text_in.encode("<|turn|><tag><|endoftext|>") == [size, size + 1, size - 1]
    assert set(text_in.special_tokens) == {size - 1, size}
    for damaged in ({"added_tokens_decoder": {"a": 7}}, {"added_tokens_decoder": None}):
        write(tmp_path, tokenizer_config__json=damaged)
        assert read_description(tmp_path, TOKENIZER) == tokenizer.to_str()


@pytest.mark.parametrize("name", ["", *OTHER_TOKENIZERS])
def test_a_folder_without_a_tokenizer_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name:
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with caplog.at_level(logging.WARNING):
        assert TextIn.load(tmp_path).tokenizer is None and not has_tokenizer(tmp_path)
    (line,) = caplog.messages
    assert f"{tmp_path} has {f'{name} but no tokenizer.json; pip install ' if name else 'none. '}" in line


@pytest.mark.full
class TestConversion:
    """Ids equal those of transformers, which mistral_common prepends ``<s>`` to."""

    def check(self, folder: Path, first: list[int]) -> None:
        from transformers import AutoTokenizer

        reference = AutoTokenizer.from_pretrained(str(folder), mistral_format=False)
        text_in = TextIn.load(folder)
        for text in TEXTS:
            assert text_in.encode(text) == [*first, *reference(text).input_ids]
            plain = text_in.encode(text, add_special_tokens=False)
            assert text_in.decode(plain, skip_special_tokens=False) == reference.decode(plain)

    def test_vocab_and_merges(self, tmp_path: Path) -> None:
        trained().save_model(str(tmp_path))
        config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added(("<|endoftext|>", True))}
        write(tmp_path, config__json={"model_type": "qwen2"}, tokenizer_config__json=config)
        self.check(tmp_path, [])

    def test_tekken(self, tmp_path: Path) -> None:
        alphabet = {char: byte for byte, char in enumerate(_characters())}
        longer = [piece for piece, _ in sorted(trained().get_vocab().items(), key=lambda item: item[1])]
        pieces = [bytes([byte]) for byte in range(256)]
        pieces += [bytes(map(alphabet.__getitem__, piece)) for piece in longer if len(piece) > 1]
        vocab = [{"rank": i, "token_bytes": base64.b64encode(each).decode()} for i, each in enumerate(pieces)]
        special = [{"rank": i, "token_str": text} for i, text in enumerate(["<unk>", "<s>", "</s>"])]
        sizes = {"default_vocab_size": len(vocab) + 8, "default_num_special_tokens": 8, "version": "v3"}
        tekken = {"config": {"pattern": PATTERN, **sizes}, "vocab": vocab, "special_tokens": special}
        self.check(write(tmp_path, tekken__json=tekken, config__json={"model_type": "mistral"}), [1])

    def test_sentence_piece(self, tmp_path: Path) -> None:
        sentencepiece = pytest.importorskip("sentencepiece")
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(TEXTS * 20), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320,
            model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        write(
            tmp_path, config__json={"model_type": "llama"}, tokenizer_config__json={"tokenizer_class": "LlamaTokenizer"}
        )
        self.check(tmp_path, [])


def _characters() -> list[str]:
    """Return the characters that byte-level tokenizers write for the bytes."""
    from quire.frontend.text.text_out import _byte_of_char

    return [char for char, _ in sorted(_byte_of_char().items(), key=lambda item: item[1])]


def test_a_failed_conversion_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"tekken\.json: transformers cannot convert it to tokenizer\.json$"):
        TextIn.load(write(tmp_path, tekken__json="{}"))


def test_the_text_is_not_changed_without_need(tmp_path: Path) -> None:
    text = Tokenizer.from_str(trained().to_str()).to_str() + "\n"
    assert read_description(write(tmp_path, tokenizer__json=text), TOKENIZER) == text
