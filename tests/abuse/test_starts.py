"""Starts that fail: limits of the machine, numbers of a checkpoint, names. The last line is the reason, in one line."""

import errno
import json
import logging
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import QUIRE

from quire.bench.measure.report import Table
from quire.launch.cli import main
from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.errors import shortage
from quire.protocol.process.log import write_line
from quire.protocol.process.signals import IGNORED_SIGNALS, STOP_SIGNALS

ESCAPES = "\x1b]0;title\x07\x1b[2J\r\n2026-01-01 ERROR forged\x9b31m"


@pytest.fixture(autouse=True)
def _process_restored() -> Iterator[None]:
    """Commands that run in this process set the level of its log, and ``serve`` its handlers of signals."""
    level = logging.getLogger("quire").level
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, *IGNORED_SIGNALS)}
    yield
    logging.getLogger("quire").setLevel(level)
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(*flags: str, limit: tuple[int, int] | None = None) -> str:
    """Start a server that cannot run, and return its output. If it does run nevertheless, skip the test."""

    def apply() -> None:
        if limit is not None:
            resource.setrlimit(limit[0], (limit[1], limit[1]))

    process = subprocess.Popen([*QUIRE, "serve", "--port", "0", *flags], stderr=subprocess.PIPE, preexec_fn=apply)
    timer = threading.Timer(120, process.kill)
    timer.start()
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.decode())
        if "(ready in" in lines[-1]:
            process.terminate()
    status = process.wait()
    timer.cancel()
    process.stderr.close()
    text = "".join(lines)
    assert "Traceback" not in text, text
    if status == 0:
        pytest.skip("this machine starts with so little")
    assert status in (1, 78) and lines[-1].startswith("quire: error: "), text
    return lines[-1]


@pytest.mark.parametrize(
    ("what", "amount", "expected"),
    [
        ("NOFILE", 16, "too many open files: raise their limit (ulimit -n)"),
        pytest.param("FSIZE", 0, "a file cannot be written: ", marks=pytest.mark.full),
        pytest.param("NOFILE", 24, "too many open files: raise their limit (ulimit -n)", marks=pytest.mark.full),
        pytest.param("AS", 400 * 2**20, "not enough memory: ", marks=pytest.mark.full),
        pytest.param("AS", 1000 * 2**20, "not enough memory: ", marks=pytest.mark.full),
    ],
)
def test_limits_are_named(what: str, amount: int, expected: str) -> None:
    assert expected in start(limit=(getattr(resource, f"RLIMIT_{what}"), amount))


def _changed(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    fields = json.loads((folder / name).read_text())
    change(fields)
    (folder / name).write_text(json.dumps(fields))
    return folder


@pytest.mark.full
def test_context_that_no_memory_holds(tmp_path: Path) -> None:
    folder = _changed(tmp_path / "model", "config.json", lambda fields: fields.update(max_position_embeddings=10**9))
    line = start(str(folder))
    assert "memory does not suffice" in line and "lower --max-model-len" in line


def test_tokenizer_on_which_its_library_panics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from quire.frontend.text.text_in import TextIn
    from quire.protocol.errors import ConfigError

    garbage = {"type": "Precompiled", "precompiled_charsmap": "AAAA////"}
    folder = _changed(tmp_path / "model", "tokenizer.json", lambda fields: fields.update(normalizer=garbage))
    with pytest.raises(ConfigError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        TextIn.load(folder)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "x"), "too many open files"),
        (OSError(errno.ENOSPC, "x", "/tmp/a"), "a file cannot be written"),
        (OSError(errno.ENOMEM, "x"), "not enough memory"),
        (BlockingIOError(errno.EAGAIN, "x"), "no process or thread can be started"),
        (MemoryError(), "not enough memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "not enough memory",
        ),
        (RuntimeError("can't start new thread"), "no process or thread can be started"),
        (ExceptionGroup("in a task", [OSError(errno.EMFILE, "x")]), "too many open files"),
    ],
)
def test_shortages_are_distinguished(error: BaseException, expected: str) -> None:
    assert shortage(error).startswith(expected) and "\n" not in shortage(error)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "x"), RuntimeError("x"), KeyError("open files"), ImportError()]
)
def test_other_errors_are_not_shortages(error: BaseException) -> None:
    assert shortage(error) == ""


# ---- names


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(arguments)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], "invalid choice: 'serv'; did you mean serve?"),
        (["run", "MODEL"], "invalid choice: 'run'; did you mean chat (in the terminal) or serve?"),
        (["pull", "org/name"], "a model is downloaded at its first use: quire serve ORG/NAME"),
        (["nothing"], "invalid choice: 'nothing' (choose from "),
        (["bench", "engin"], "did you mean engine?"),
        (["serve", "--dtype", "bfloat"], "--dtype: invalid choice: 'bfloat'; did you mean bfloat16?"),
        (["serve", "/nope"], "/nope does not exist: MODEL must be a folder"),
        (["serve", "--config", "twice.yaml"], "twice.yaml: max-num-seqs and max_num_seqs are the same setting"),
        (["serve", "--port", "0", "m\udce9"], "cannot be encoded as utf-8: names of files must be UTF-8"),
    ],
)
def test_mistakes_of_a_first_hour_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("twice.yaml").write_text("max-num-seqs: 4\nport: 0\nmax_num_seqs: 5\n")
    shutil.copytree(DEMO_MODEL, "m\udce9")
    line = _fails(words, capsys)
    assert said in line and line.count("\n") == 1 and line[:-1].isprintable()


def test_a_failed_download_is_the_first_line_of_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("\nGot: ConnectError [Errno 111]\nAn error happened while trying to locate the files")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    line = _fails(["serve", "org/name"], capsys)
    assert line.endswith("its download failed: OSError: Got: ConnectError [Errno 111]\n")


def test_names_are_printed_without_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders, files and flags whose names hold line breaks and commands for a terminal."""
    folder = tmp_path / ESCAPES.replace("/", "")
    folder.mkdir()
    (folder / "config.yaml").write_text("[")
    (folder / "trace.jsonl").write_text("{}")
    shown = [
        _fails(["serve", str(folder)], capsys),
        _fails(["serve", f"{folder}-missing"], capsys),
        _fails(["serve", "--config", str(folder / "config.yaml")], capsys),
        _fails(["replay", str(folder / "trace.jsonl")], capsys),
        _fails(["serve", f"--{ESCAPES}"], capsys),
        _fails([ESCAPES], capsys),
    ]
    write_line(f"Quire serves {folder.name} on http://127.0.0.1:8000 (ready in 1.0 s)")
    shown.append(capsys.readouterr().err)
    shown.append(Table(ESCAPES, [ESCAPES], [(ESCAPES, [ESCAPES])]).text().replace("\n", "") + "\n")
    for text in shown:
        assert text.endswith("\n") and text[:-1].isprintable() and "title" in text, text
