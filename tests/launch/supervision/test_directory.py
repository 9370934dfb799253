"""Folders of sockets."""

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from quire.launch.supervision import directory
from quire.launch.supervision.directory import make_directory, parent_of_sockets
from quire.protocol.errors import ConfigError
from quire.protocol.process.owned_folder import remove_folder


@pytest.mark.parametrize("length", [40, 51, 200])
def test_sockets_have_short_paths_below_any_folder_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = f"./{'x' * (length - 2)}"
    Path(folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    made, lock = make_directory()
    assert made.parent == (Path("/tmp") if length > 50 else Path(folder))
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    remove_folder(made, lock)
    monkeypatch.setattr(directory, "SHORT", str(tmp_path / "missing"))
    if length > 50:
        with pytest.raises(ConfigError, match=f"TMPDIR must have at most 50 bytes for sockets .got {folder}.: choose"):
            parent_of_sockets()


def test_a_start_removes_what_killed_ones_left_and_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts are killed before they lock a directory, before it has its name, later, and while it is removed."""
    monkeypatch.setattr(directory, "parent_of_sockets", lambda: str(tmp_path))
    for name in ("quire-a.new", "quire-b.new/lock", "quire-c/lock", "quire-d/adapters", "quire-e.ended/adapters"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        (path.touch if "/" in name else path.mkdir)()
    living = [make_directory() for _ in range(2)]
    (starting := tmp_path / "quire-f.new").mkdir()
    with (starting / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made, ours = make_directory()
    assert set(tmp_path.iterdir()) == {made, starting, tmp_path / "quire-d", *(each for each, _ in living)}
    for each, held in (*living, (made, ours)):
        remove_folder(each, held)
    assert {path.name for path in tmp_path.iterdir()} == {"quire-f.new", "quire-d"}


def test_a_start_makes_another_directory_if_its_new_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "parent_of_sockets", lambda: str(tmp_path))
    stages = iter((os.rmdir, lambda path: (Path(path) / "lock").touch() or remove_folder(Path(path))))
    make = tempfile.mkdtemp

    def make_and_remove(**options: str) -> str:
        path = make(**options)
        next(stages, lambda path: None)(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_remove)
    made, lock = make_directory()
    assert list(tmp_path.iterdir()) == [made] and list(made.iterdir()) == [made / "lock"]
    os.close(lock)


def test_a_process_that_still_writes_keeps_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a killed supervisor removes the directory while another one makes its socket."""
    (tmp_path / "quire-a").mkdir()
    (tmp_path / "quire-a" / "lock").touch()
    remove = os.rmdir

    def write_first(*place: object, **options: int) -> None:
        with suppress(FileNotFoundError):
            (tmp_path / "quire-a" / "frontend-1.sock").touch()
        remove(*place, **options)

    monkeypatch.setattr(os, "rmdir", write_first)
    remove_folder(tmp_path / "quire-a")
    assert not list(tmp_path.iterdir())


def test_a_removal_that_was_cut_off_is_continued_by_any_other_process(tmp_path: Path) -> None:
    (tmp_path / "quire-a.ended").mkdir()
    (tmp_path / "quire-a.ended" / "frontend-1.sock").touch()
    remove_folder(tmp_path / "quire-a")
    assert not list(tmp_path.iterdir())
