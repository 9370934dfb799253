"""Codex and Claude Code finish a task of three tools against ``quire serve``, without any other server.

They are the newest releases of npm. The model is a script checkpoint: each answer is selected by the last tool's
result, so a step that is lost ends the task with nothing. docs/clients.md has the transcripts.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conversations import call
from environments import NotInstalled, node_environment, own_variables
from script_checkpoint import make_script_checkpoint
from served import Served

pytestmark = pytest.mark.slow

TASK = "Write two fruits into a file, read it, and count its lines."
TEXT = "quinces\nmedlars\n"
FINAL = "The file has two lines, quinces and medlars."
THANKS = "Thank you."
WELCOME = "You are welcome."
TASK_S = 300
"""The prompts of both have 40,000 characters and more, each of which is a token of the script's model."""


@contextmanager
def scripted(folder: Path, write: str, read: str, count: str) -> Iterator[Served]:
    """Serve a model that makes these three calls, says ``FINAL``, and then ``WELCOME``."""
    answers = {
        "counted 2": ["", "", "", FINAL, WELCOME],
        "quinces": ["", "", count],
        "notes.txt": ["", read],
        "two fruits": [f"<think>\nFirst the file.\n</think>\n\n{write}"],
    }
    make_script_checkpoint(folder, answers, max_model_len=131072)
    thinking = ("--reasoning-parser", "markers", "--reasoning-start-str", "<think>", "--reasoning-end-str", "</think>")
    served = Served(str(folder), "--served-model-name", "script", "--log-level", "info", *thinking)
    try:
        yield served
        assert served.stop() == 0
        assert not any("Traceback" in line for line in served.log), "".join(served.log)
    finally:
        served.stop()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command of a package in ``tmp_path/work``, with a home of its own."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()

    def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        home = str(tmp_path / "home")
        done = subprocess.run(
            [str(folder / "node_modules/.bin" / command[0]), *command[1:]],
            cwd=tmp_path / "work",
            env=own_variables(**{"HOME": home, **variables}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "work/notes.txt").read_text() == TEXT
        return done

    return run


def installed(name: str, package: str) -> Path:
    try:
        return node_environment(name, package)
    except NotInstalled as error:
        pytest.skip(f"{package} is not available: {error}")


@pytest.mark.parametrize("over", ["HTTP", "a web socket"])
def test_codex(tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]], over: str) -> None:
    """Over Responses. The commands are the script's, so Codex needs no sandbox, which not every machine allows."""
    folder = installed("codex", "@openai/codex")
    shell = [
        "printf 'quinces\\nmedlars\\n' > notes.txt && ls",
        "cat notes.txt",
        "echo counted $(wc -l < notes.txt)",
    ]
    calls = [call("exec_command", {"cmd": command}) for command in shell]
    with scripted(tmp_path / "model", *calls) as server:
        fields = f'name = "Quire", base_url = "{server.url}/v1", wire_api = "responses"'
        provider = f"{{ {fields}, supports_websockets = {'false' if over == 'HTTP' else 'true'} }}"
        settings = ("-c", "model_provider=quire", "-c", f"model_providers.quire={provider}")
        flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--model", "script")
        home = str(tmp_path / "home")
        done = run(folder, "codex", "exec", *settings, *flags, TASK, CODEX_HOME=home)
        second = run(folder, "codex", "exec", "resume", "--last", *settings, *flags, THANKS, CODEX_HOME=home)
    assert (done.stdout.strip(), second.stdout.strip()) == (FINAL, WELCOME)
    assert done.stderr.count("succeeded in") == len(shell), done.stderr
    assert any("path=/v1/responses status=101" in line for line in server.log) == (over != "HTTP")


def test_claude_code(tmp_path: Path, run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Over Messages; most of each later prompt is found in the prefix cache."""
    folder = installed("claude_code", "@anthropic-ai/claude-code")
    file = str(tmp_path / "work/notes.txt")
    calls = [
        call("Write", {"file_path": file, "content": TEXT}),
        call("Read", {"file_path": file}),
        call("Bash", {"command": f"echo counted $(wc -l < {file})"}),
    ]
    with scripted(tmp_path / "model", *calls) as server:
        variables = {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": "script",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        flags = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Write", "Read", "Bash")
        done = run(folder, "claude", "-p", TASK, *flags, **variables)
        second = run(folder, "claude", "-p", THANKS, "--continue", **variables)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    answers = [line["message"] for line in lines if line["type"] == "assistant"]
    blocks = [block for answer in answers for block in answer["content"]]
    assert [block["name"] for block in blocks if block["type"] == "tool_use"] == ["Write", "Read", "Bash"]
    assert (lines[-1]["result"], second.stdout.strip()) == (FINAL, WELCOME)
    usage = answers[-1]["usage"]
    assert usage["cache_read_input_tokens"] > 20 * usage["input_tokens"]
