"""What a worker says of the files that it has loaded."""

from pathlib import Path
from socket import gethostname

import msgspec
import pytest
from scheduler_driver import make_config

from quire.protocol.config import RankPlace
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint_digest import checkpoint_digest
from quire.worker_proc.startup.loaded_files import name_loaded_files


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


def test_files_are_named_by_their_state_and_on_a_node_by_their_bytes(tmp_path: Path) -> None:
    path, copy = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    here = make_config(model_path=str(path))
    remote = make_config(model_path=str(copy), ranks=[RankPlace("10.0.0.1:1", 0, "")])
    assert name_loaded_files(here)() == name_loaded_files(here)() == checkpoint_digest(path).state
    assert name_loaded_files(remote)() == checkpoint_digest(path).digest, "the bytes are those of the other machine"
    (copy / "model.safetensors").write_bytes(bytes(2**20))
    assert name_loaded_files(remote)() != checkpoint_digest(path).digest
    assert name_loaded_files(msgspec.structs.replace(here, load_format="dummy"))() == ""


@pytest.mark.parametrize("places", [[], [RankPlace("10.0.0.1:1", 0, "")]], ids=["here", "node"])
@pytest.mark.parametrize("change", ["write", "remove"])
def test_files_that_change_while_they_are_loaded_have_no_name(
    tmp_path: Path, places: list[RankPlace], change: str
) -> None:
    config = make_config(model_path=str(checkpoint(tmp_path / "one")), ranks=places)
    file = tmp_path / "one" / "model.safetensors"
    names = [name_loaded_files(config) for _ in range(2)]
    file.unlink() if change == "remove" else file.write_bytes(b"other weights")
    found = {name() for name in names}
    assert len(found) == 2 and not found & set(checkpoint_digest(tmp_path / "one"))


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{gethostname()} cannot read the model .*: No such file or .*: it must be"):
        name_loaded_files(make_config(model_path=str(tmp_path / "none")))
