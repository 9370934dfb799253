"""``quire completion``: the scripts, run by the shells that are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.launch.cli import COMMANDS, main
from quire.launch.completion import SHELLS

CASES = {
    "quire ser": {"serve"},
    "quire serve --dty": {"--dtype"},
    "quire serve --dtype ": {"auto", "bfloat16", "float16", "float32"},
    "quire serve --dtype=b": {"bfloat16"},
    "quire serve --no-fair": {"--no-fair-admission"},
    "quire replay trace --overlong d": {"drop"},
    "quire bench s": {"sampling", "scheduler", "serve"},
    "quire bench serve --ur": {"--url"},
    "quire bench kernels --device cu": {"cuda"},
    "quire completion b": {"bash"},
    "quire serve --trace /et": {"/etc"},
    "quire serve --config=/et": {"/etc"},
    "quire serve /et": {"/etc"},
    "quire serve --trace-max-bytes /et": set(),
}


@pytest.fixture(params=SHELLS)
def shell_and_script(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, Path]:
    """A shell that is installed, and a file with its script."""
    shell = str(request.param)
    main(["completion", shell])
    script = tmp_path / shell
    script.write_text(capsys.readouterr().out)
    assert all(name.split()[-1] in script.read_text() for name in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return shell, script


def test_a_shell_completes(shell_and_script: tuple[str, Path]) -> None:
    shell, script = shell_and_script
    if shell == "zsh":  # completes only in a terminal
        code = f"compdef() {{ print $1 }}; source {script}; printf '%s\\n' $_shtab_quire_serve_options"
        assert {"_shtab_quire", "--dtype=[data"} <= {line.split(" ")[0] for line in run(shell, code)}
        return
    for line, expected in CASES.items():
        if shell == "bash":
            words = line.replace("=", " = ").split(" ")
            code = (
                f"source {script}; COMP_WORDS=({' '.join(words[:-1])} {words[-1]!r}); COMP_CWORD={len(words) - 1}; "
                "_quire; printf '%s\\n' \"${COMPREPLY[@]}\""
            )
            found = run(shell, code)
        else:
            found = {
                each.rpartition("=")[2].rstrip("/") for each in run(shell, f"source {script}; complete -C {line!r}")
            }
        assert found - {""} == expected, line


def run(shell: str, code: str) -> set[str]:
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines()}
