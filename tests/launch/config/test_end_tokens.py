"""The tokens that end an answer, from the files of a checkpoint that do not agree."""

import json
from pathlib import Path
from typing import Any

import pytest
from script_checkpoint import END, make_script_checkpoint

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import parse_options

CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|user|>\n{% endfor %}"
PARTS = "{% for m in messages %}{{ m.content }}<|user|><|tool|>{% endfor %}"
REFUSING = "{{ raise_exception('no') }}"
CLOSED = "{% for m in messages %}{{ m.content }}{{ '\n\n' if loop.last else '' }}{% endfor %}"


def ends(folder: Path, config: dict[str, Any], added: tuple[str, ...] = (), **options: Any) -> set[str]:
    """Return the texts of the end tokens; that of config.json is the last special token."""
    make_script_checkpoint(folder, ["Hi"], tokenizer_config=config)
    file = json.loads((folder / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    settings = json.loads((folder / "config.json").read_text())
    settings["eos_token_id"] = vocab["<|system|>"]
    (folder / "config.json").write_text(json.dumps(settings))
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] not in added]
    (folder / "tokenizer.json").write_text(json.dumps(file))
    parsed = parse_options({"device": "cpu", **options}, "LLM")
    model = make_engine_config(parsed, folder=folder).model
    return {text for text, index in vocab.items() if index in model.eos_token_ids}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"eos_token": None, "chat_template": None}, set()),
        ({"eos_token": END, "chat_template": None}, {END}),
        ({"eos_token": {"content": END, "lstrip": False}, "chat_template": None}, {END}),
        ({"eos_token": END, "chat_template": CHATML}, {END, "<|user|>"}),
        ({"eos_token": END, "chat_template": REFUSING}, {END}),
        ({"eos_token": None, "chat_template": PARTS}, set()),
        ({"eos_token": None, "chat_template": CLOSED}, set()),
        ({"eos_token": "absent", "chat_template": None}, set()),
    ],
)
def test_end_tokens_of_all_files_are_merged(tmp_path: Path, config: dict[str, Any], found: set[str]) -> None:
    assert ends(tmp_path, config) == {"<|system|>"} | found


def test_end_token_that_only_the_vocabulary_has(tmp_path: Path) -> None:
    assert ends(tmp_path, {"eos_token": END, "chat_template": None}, (END,)) == {"<|system|>", END}


def test_given_template_decides(tmp_path: Path) -> None:
    assert ends(tmp_path, {"eos_token": None}, chat_template=CHATML) == {"<|system|>", "<|user|>"}
