"""Names of adapters, and the table that several front ends share."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from quire.frontend.adapters.names import MAX_NAME_CHARS, NamedAdapter, NameTable, name_problem

SCRIPT = """
import sys
from pathlib import Path
from quire.frontend.adapters.names import NamedAdapter, NameTable
for i in range(20):
    adapter = NamedAdapter(name=f"p{i}", path="/p", digest=bytes(32), rank=4, num_bytes=1)
    NameTable(Path(sys.argv[1])).change(lambda names: names.update({adapter.name: adapter}))
"""


def named(name: str, number: int = 0) -> NamedAdapter:
    return NamedAdapter(name=name, path=f"/{name}", digest=bytes([number]) * 32, rank=4, num_bytes=1)


def add(path: Path, *names: str) -> None:
    table = NameTable(path)
    for name in names:
        table.change(lambda found, name=name: found.update({name: named(name)}))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["a", "sql-v2", "org:adapter@3", "Grüße 你好", "org/sql.v2", "x" * MAX_NAME_CHARS])
def test_allowed_names(name: str) -> None:
    assert name_problem(name) == ""


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "/a", "../a", "a\\b", "a\nb", "a\0b", "\x1b[31m", "\ud800", "x" * (MAX_NAME_CHARS + 1)],
)
def test_refused_names(name: str) -> None:
    problem = name_problem(name)
    assert "must have 1 to 256 printable characters" in problem
    assert problem.isprintable()


def test_another_table_of_the_same_file_sees_each_change(tmp_path: Path) -> None:
    mine, other = NameTable(tmp_path / "adapters"), NameTable(tmp_path / "adapters")
    assert mine.names() == other.names() == {}
    mine.change(lambda names: names.update(a=named("a", 1)))
    assert other.names() == {"a": named("a", 1)}
    other.change(lambda names: names.update(a=named("a", 2)))
    assert mine.names() == {"a": named("a", 2)}
    mine.change(lambda names: names.clear())
    assert other.names() == {}


def test_the_file_is_read_only_after_a_change(tmp_path: Path) -> None:
    table = NameTable(tmp_path / "adapters")
    table.change(lambda names: names.update(a=named("a")))
    assert table.names() is table.names()


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    table = NameTable(tmp_path / "adapters")
    table.change(lambda names: names.update(a=named("a")))

    def fail(names: dict[str, NamedAdapter]) -> None:
        names.clear()
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        table.change(fail)
    assert NameTable(tmp_path / "adapters").names() == {"a": named("a")}


def test_a_half_written_file_of_a_killed_process_is_not_read(tmp_path: Path) -> None:
    table = NameTable(tmp_path / "adapters")
    table.change(lambda names: names.update(a=named("a")))
    (tmp_path / "adapters.new").write_bytes(msgspec.msgpack.encode([named("b")])[:10])
    assert table.names() == {"a": named("a")}
    table.change(lambda names: names.update(c=named("c")))
    assert set(NameTable(tmp_path / "adapters").names()) == {"a", "c"}


def test_processes_and_threads_lose_no_change_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "adapters"
    process = subprocess.Popen([sys.executable, "-P", "-c", SCRIPT, str(path)])
    threads = [threading.Thread(target=add, args=(path, *(f"{t}-{i}" for i in range(20)))) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.wait(60) == 0
    assert len(NameTable(path).names()) == 60
