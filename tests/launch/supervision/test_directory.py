"""Folders of sockets."""

import stat
import tempfile
from pathlib import Path

import pytest

from quire.launch.supervision import directory
from quire.launch.supervision.directory import make_directory, parent_of_sockets, remove_directory
from quire.protocol.errors import ConfigError


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
    remove_directory(made, lock)
    monkeypatch.setattr(directory, "SHORT", str(tmp_path / "missing"))
    if length > 50:
        with pytest.raises(ConfigError, match=f"TMPDIR must have at most 50 bytes for sockets .got {folder}.: choose"):
            parent_of_sockets()
