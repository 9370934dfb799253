"""``--help`` of the commands, alone and with a word."""

import pytest

from quire.launch.cli import COMMANDS, main


def help_of(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code or 0) == status
    out, err = capsys.readouterr()
    return " ".join((err if status else out).split())


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        for word in ("-h", "--help", "--help=all"):
            text = help_of(capsys, *name.split(), word)
            assert f"usage: quire {name}" in text and command.text.split(".")[0].split()[0] in text


def test_serve_lists_sections(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", "--help")
    assert "usage: quire serve [flags] [MODEL]" in text and "--config FILE.yaml" in text
    assert "memory Memory and batch sizes (17 flags)" in text and "--max-num-seqs" not in text
    assert "adapters Adapters (6 flags)" in text  # of the engine and of the server, as one section
    assert help_of(capsys, "serve", "--help=adapters").count("Adapters:") == 1


@pytest.mark.parametrize("word", ["scheduling", "scheduler", "sched", "Scheduling"])
def test_a_section_by_its_name_or_one_like_it(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", f"--help={word}")
    assert text.startswith("Scheduling: --priority-range LOW:HIGH") and "--watermark FRACTION" in text
    assert "--gpu-memory-utilization" not in text


@pytest.mark.parametrize("word", ["--fair-admission", "fair_admission", "--no-fair-admission"])
def test_one_flag_with_all_that_is_declared(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", f"--help={word}")
    assert (
        "Without API keys, rows and KV blocks are divided between client addresses: docs/scheduling.md#tenants" in text
    )
    assert "default: on values: true or false in a file: fair_admission section: Scheduling" in text


def test_flags_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", "--help", "CERTIFICATE")
    assert text.startswith("Server: --ssl-certfile FILE") and "--ssl-keyfile FILE" in text and "--port" not in text
    assert "--seed N" in help_of(capsys, "chat", "--help=sampling-seed")


def test_a_word_that_nothing_has(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "serve", "--help=xyzzy", status=2)
    assert "no section, flag or text has 'xyzzy'; sections: server, adapters, engines, logs, images, model" in text
    assert "did you mean --max-model-len?" in help_of(capsys, "serve", "--help=ctx-size", status=2)
