"""``quire check``: what a checkpoint can do, from its files alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from quire.launch.cli import main
from quire.launch.config.model_folder import DEMO_MODEL

Checked = Callable[..., tuple[int, str]]


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Checked:
    """Run the command, and return its exit status and what it printed."""

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", *words])
        assert isinstance(ended.value.code, int)
        return ended.value.code, "".join(capsys.readouterr())

    return run


def test_the_demo_model_loses_nothing(checked: Checked) -> None:
    status, text = checked()
    rows = dict(line.split(None, 1) for line in text.splitlines() if "  " in line)
    assert (status, rows["roles"], rows["tools"]) == (
        0,
        "system, developer, user, assistant, tool",
        "format hermes, read back",
    )
    assert rows["parameters"] == "1,181,376" and "lost" not in text


def test_a_tokenizer_that_does_not_fit_the_model(checked: Checked, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|extra|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    status, text = checked(str(folder), "--json", "--chat-template", template)
    found = json.loads(text)
    assert status == 1 and found["vocabulary"] == 1024 and found["end_tokens"][1] == "2 <|im_end|>"
    assert found["chat_template"] == "--chat-template"
    assert found["losses"][-2].endswith("beyond the model's vocabulary, such as '<|extra|>'")
    written = "the tokenizer has no token {}, which the chat template writes{}".format
    assert found["losses"][-1] == written("<|end|>", " after an answer") and found["notes"] == [written("<|user|>", "")]
    (folder / "tokenizer.json").unlink()
    status, text = checked(str(folder))
    assert status == 1 and text.count("no tokenizer: ") == 1


def test_a_broken_checkpoint_is_one_line(checked: Checked, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    status, text = checked(str(tmp_path))
    assert status == 1 and text.startswith("quire: error: ") and text.count("\n") == 1
