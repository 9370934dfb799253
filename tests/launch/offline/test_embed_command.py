"""``quire embed`` with a running server."""

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_http import Answer, FakeHttp, fake_http

from quire.launch import cli
from quire.launch.offline import embed_command


def answer(body: Any) -> Answer:
    """The vector of a text is its length; a text with "!" has an error, "?" is refused."""
    if "?" in body["input"]:
        return 400, b'{"error": {"message": "too hot"}}'
    return 200, json.dumps({"data": [entry(text) for text in body["input"]]}).encode()


def entry(text: str) -> dict[str, Any]:
    if "!" in text:
        return {"embedding": None, "error": {"message": "not finite"}}
    return {"embedding": base64.b64encode(np.array([len(text), 0.5], "<f4").tobytes()).decode()}


@pytest.fixture
def server() -> Iterator[FakeHttp]:
    with fake_http(answer) as made:
        yield made


def run(*arguments: str) -> None:
    cli.main(["embed", *arguments])


def test_lines(server: FakeHttp, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "in").write_text("a\nbcd\n\n", encoding="utf-8")
    given = ("--dimensions", "2", "--truncate-prompt-tokens", "-1", "--prompt-name", "query", "--api-key", "k")
    run(str(tmp_path / "in"), "--url", server.url, *given)
    sys.stdout.flush()
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert found == [{"index": i, "embedding": [size, 0.5]} for i, size in enumerate([1.0, 3.0, 0.0])]
    ((path, body, key),) = server.bodies
    assert (path, key) == ("/v1/embeddings", "Bearer k")
    assert body == {
        "model": "one",
        "input": ["a", "bcd", ""],
        "encoding_format": "base64",
        "dimensions": 2,
        "truncate_prompt_tokens": -1,
        "prompt_name": "query",
    }


def test_array_from_standard_input(server: FakeHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_command, "CHUNK", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nbb\nccc"))
    run("-", "--url", server.url, "--format", "npy", "-o", str(tmp_path / "out"))
    with (tmp_path / "out").open("rb") as file:
        found = np.lib.format.read_array(file, allow_pickle=False)
    assert found.tolist() == [[1, 0.5], [2, 0.5], [3, 0.5]]
    assert [body["input"] for _, body, _ in server.bodies] == [["a", "bb"], ["ccc"]]


def test_array_of_a_chunk_whose_lines_all_fail(
    server: FakeHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_command, "CHUNK", 2)
    (tmp_path / "in").write_text("!\n!\na\nbb\n!\n")
    with pytest.raises(SystemExit):
        run(str(tmp_path / "in"), "--url", server.url, "--format", "npy", "-o", str(tmp_path / "out"))
    with (tmp_path / "out").open("rb") as file:
        found = np.lib.format.read_array(file, allow_pickle=False)
    assert np.isnan(found).all(1).tolist() == [True, True, False, False, True]
    assert found[2:4].tolist() == [[1, 0.5], [2, 0.5]]


def test_long_lines_are_sent_in_several_requests(server: FakeHttp, tmp_path: Path) -> None:
    """A server limits the size of a body."""
    lines = ["x" * 900_000] * 5
    (tmp_path / "in").write_text("\n".join(lines))
    run(str(tmp_path / "in"), "--url", server.url, "-o", str(tmp_path / "out"))
    assert [len(body["input"]) for _, body, _ in server.bodies] == [2, 2, 1]
    assert [json.loads(line)["index"] for line in (tmp_path / "out").read_text().splitlines()] == list(range(5))


def test_input_that_is_not_text(server: FakeHttp, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_bytes(b"a\n\xff\xfe\n")
    with pytest.raises(SystemExit):
        run(str(tmp_path / "in"), "--url", server.url)
    assert "in cannot be read as text" in capfd.readouterr().err


def test_failures(server: FakeHttp, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A line without a vector has an error; a refusal ends the command."""
    (tmp_path / "in").write_text("a\nb!\n")
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        run(str(tmp_path / "in"), "--url", server.url, "-o", str(out))
    assert "1 of 2 lines have no vector" in capfd.readouterr().err
    assert json.loads(out.read_text().splitlines()[1]) == {"index": 1, "error": "not finite"}
    (tmp_path / "in").write_text("?\n")
    with pytest.raises(SystemExit):
        run(str(tmp_path / "in"), "--url", server.url)
    assert "400 too hot" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/nowhere/x",), "/nowhere/x cannot be read"),
        (("-", "-o", "/nowhere/x"), "--output-file /nowhere/x cannot be used"),
        (("-", "--dtype", "float32"), "--url cannot be combined with --dtype"),
        (("-", "--format", "csv"), "invalid choice: 'csv'"),
    ],
)
def test_bad_arguments(
    server: FakeHttp, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments, "--url", server.url)
    assert ended.value.code
    assert message in capfd.readouterr().err
