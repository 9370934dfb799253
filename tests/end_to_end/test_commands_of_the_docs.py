"""The commands of README.md and of the first screens of docs/ are run; what they print has the shape given here.

A command of README.md or of a first screen needs a row in SHAPES or NOT_HERE, so that a new one cannot be forgotten.
Numbers are masked. All other commands of the pages are parsed: their flags exist.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import QUIRE, Served

from quire.launch.cli import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST_SCREEN = 40
"""Lines."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\.venv/bin/)?(quire|curl|make|python)\b(?! top  http)")

SHAPES: dict[str, str] = {
    'curl http://127.0.0.1:8000/v1/chat/completions -d \'{"messages"': r'\{"id":"chatcmpl-#","object":"chat\.completi'
    r'on",.*"choices":\[\{"index":#,"message":\{"role":"assistant","content":"\w.*"usage":\{"prompt_tokens":#,',
    "curl http://127.0.0.1:8000/v1/decisions": r'\{"model":".*","answers":\[\{"type":"predicate","name":"angry","probab'
    r'ility":#.*\},\{"type":"choice","name":null,"choice":".*","confidence":#.*,"probabilities":\[\{"value":"billing",',
    "quire chat --prompt": "#, #, #, #, #",
    "quire generate --prompt": r'\{"text":".*"token_ids":\[#',
    "quire check ": r"checkpoint +\S+\narchitecture +LlamaForCausalLM\nimplementation +native\nparameters +#",
    "quire chat --url": "#, #, #",
    "quire top": r"quire top  http://\S+  quire-demo  ready .*\n\nrequests +running # +waiting #",
    "quire bench serve": r"latency +mean +p# +p# +p# +max\ntime to first token, ms +#.*requests completed +#\n",
    "quire replay run.jsonl $": r"run\.jsonl: as recorded\nreplayed exactly: all decisions are equal \(# steps\)\n",
    "quire replay run.jsonl --compare": r"first:  quire.*\nsecond: quire.*block_size=#\n  block_size: # -> #\n.*"
    r"\n# requests finished in both runs: # slower .*\n\nchange, ms +mean\nttft +-?#",
    "quire replay run.jsonl --set": r"quire: open loop with block_size=#\n.*latency, mean +recorded +base +changed\n",
    'curl http://127.0.0.1:8000/v1/chat/completions -d \'{"job_id"': r'\{"id":"chatcmpl-#","object":"chat\.completion"',
}
"""Beginning of a command, with "$" at its end, and a pattern of its masked output."""

NOT_HERE = {
    "make serve": "installs packages; tests/tools/test_step.py",
    "quire chat demo-vision": "tests/end_to_end/test_demo_vision.py",
    "make test": "runs this test",
    "quire serve --trace": "the server of these tests is this command",
    "quire serve --simulate roofline:h200": "tests/end_to_end/test_simulated_serve.py",
    "quire serve FOLDER": "needs adapters: tests/end_to_end/test_adapters.py",
    'curl http://127.0.0.1:8000/v1/chat/completions -d \'{"model": "sql"': "needs adapters",
    "quire serve /path/to/Qwen3-Embedding": "needs that model: tests/end_to_end/test_pooling.py",
    "curl http://127.0.0.1:8000/v1/embeddings": "needs that model",
    "quire serve MODEL --data-parallel-size": "two engines: tests/end_to_end/test_fleet.py",
    "quire bench kernels": "minutes, or a GPU",
    "quire replay conversation.jsonl.gz": "needs a public trace",
    "curl -X POST $U/v1/sessions": "test_a_session_is_as_its_page_shows",
    "curl $U/v1/completions": "test_a_session_is_as_its_page_shows",
    "curl -X DELETE $U/v1/sessions": "test_a_session_is_as_its_page_shows",
}
FEWER = {"quire top": "--once", "quire bench serve": "--num-prompts 8 --max-tokens 4"}
"""Flags that end a command sooner."""
README = (ROOT / "README.md").read_text()
CHAT_INPUT = "Count from 1 to 3.\n"


def commands(text: str) -> list[str]:
    """Return the commands of the text's blocks, one line each, without comments and the path of the environment."""
    found = []
    for language, fenced, indented in BLOCK.findall(text):
        if language not in ("", "sh"):
            continue
        whole = ""
        for line in re.sub(r" *\\\n *", " ", fenced or indented).splitlines():
            whole = f"{whole} {line.strip()}".strip()
            if whole.count("'") % 2 and COMMAND.match(whole):
                continue  # a text in quotes goes over several lines
            if COMMAND.match(whole):
                found.append(re.sub(r" +# .*", "", whole.removeprefix(".venv/bin/")))
            whole = ""
    return found


def first_screen(page: Path) -> str:
    text = page.read_text()
    return text if page.name == "README.md" else "\n".join(text.splitlines()[:FIRST_SCREEN]) + "\n"


def shown() -> list[str]:
    return list(dict.fromkeys(command for page in PAGES for command in commands(first_screen(page))))


SHOWN = shown()


def row(table: dict[str, str], command: str) -> str | None:
    return next((value for begin, value in table.items() if f"{command} $".startswith(begin)), None)


def masked(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{16,}\b|\d+(?:[,.]\d+)*", "#", text)


def test_each_command_is_run_or_says_why_not() -> None:
    assert len(SHOWN) >= 25
    for command in SHOWN:
        assert bool(row(SHAPES, command)) != bool(row(NOT_HERE, command)), command
    for table in (SHAPES, NOT_HERE):
        assert all(any(f"{command} $".startswith(begin) for command in SHOWN) for begin in table)


def test_each_quire_command_of_the_pages_parses(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each for page in PAGES if page.name != "log.md" for each in commands(page.read_text())}
    lines = sorted(each for each in found if each.startswith("quire ") and not re.search(r"\.\.\.|[|<>&]", each))
    assert len(lines) >= 40
    refused = []
    for line in lines:
        try:
            parse(shlex.split(line)[1:])
        except SystemExit as ending:
            refused += [f"{line}: {capsys.readouterr().err}"] if ending.code else []
    assert not refused, "\n".join(refused)


class Shell:
    """A folder with a server that records its trace there, and the ``quire`` of these tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "quire"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(QUIRE)} "$@"\n')
        program.chmod(0o755)
        self.server = Served("--trace", str(folder / "run.jsonl"))

    def run(self, command: str, *, mask: bool = True) -> str:
        """Return the output of a command, with its numbers masked; fail if its status is not 0."""
        command = command.replace("http://127.0.0.1:8000", self.server.url)
        command = command.replace("[...]", '[{"role": "user", "content": "Hi"}]')
        for begin, more in FEWER.items():
            command += f" --url {self.server.url} {more}" if command.startswith(begin) else ""
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        options = {"input": CHAT_INPUT, "capture_output": True, "text": True, "cwd": self.folder, "env": environment}
        done = subprocess.run(["bash", "-c", command], check=False, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return masked(done.stdout) if mask else done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("shell"))
    yield shell
    shell.server.stop()


@pytest.mark.full
def test_a_session_is_as_its_page_shows(shell: Shell) -> None:
    def shape(text: str) -> str:
        text = re.sub(r"sess_[0-9a-f]+(\.\.\.)?", "SESSION", text)
        return masked(re.sub(r'"text":"[^"]*"', '"text":""', text))

    screen = first_screen(ROOT / "docs/sessions.md")
    answers = re.findall(r"^    (\{.*(?:\n     .*)*)", screen, re.MULTILINE)
    runs = [command for command in commands(screen) if command.startswith("curl")]
    assert len(runs) == len(answers) == 5
    session = ""
    for command, answer in zip(runs, answers, strict=True):
        printed = shell.run(command.replace("$U", "http://127.0.0.1:8000").replace("sess_943e...", session), mask=False)
        session = session or re.findall(r"sess_[0-9a-f]+", printed)[0]
        parts = re.split(r"[ ,]*\.\.\.[ ,]*", shape(" ".join(answer.split())))
        assert re.fullmatch(".*".join(map(re.escape, parts)), shape(printed)), f"{command} prints {printed}"


@pytest.mark.full
def test_the_example_in_python_and_the_small_engine_print_what_they_are_for(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (small,) = re.findall(
        r"`\.venv/bin/python (-P docs/small_engine\.py [^`]*)`", (ROOT / "docs/README.md").read_text()
    )
    for arguments, shape in ((["-c", example], r".* #\n.* #\n#\n$"), (shlex.split(small), r".{99}")):
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        assert re.match(shape, masked(done.stdout), re.DOTALL), done.stdout


@pytest.mark.full
def test_the_commands_print_what_they_are_for(shell: Shell) -> None:
    run = [command for command in SHOWN if row(SHAPES, command)]
    replays = [command for command in run if command.startswith("quire replay")]
    for command in [each for each in run if each not in replays]:
        check(shell, command)
    assert shell.server.stop() == 0  # which ends its trace
    for command in replays:
        check(shell, command)
    assert "</html>" in (shell.folder / "report.html").read_text()


def check(shell: Shell, command: str) -> None:
    printed, shape = shell.run(command), row(SHAPES, command)
    assert shape is not None and re.search(shape, printed, re.DOTALL), f"{command} prints:\n{printed}"
