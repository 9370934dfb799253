"""What a worker on a node checks before it joins its group."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import gethostname

import pytest
from scheduler_driver import make_config

from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.model.checkpoint_digest import checkpoint_digest
from quire.protocol.nodes import WorkerLink
from quire.worker_proc.parallel.group import SingleRank
from quire.worker_proc.parallel.join import join_group


def _checkpoint(folder: Path, name: str = "llama") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"model_type": "{name}"}}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


def _join(model: Path, checkpoint: str, tmp_path: Path) -> None:
    link = WorkerLink(address="tcp://10.0.0.1:1", scheduler_key="", public_key="", secret_key="", checkpoint=checkpoint)
    group = join_group(make_config(model_path=str(model)), 0, tmp_path / "ranks-1", link)
    assert isinstance(group, SingleRank)


def test_a_copy_of_the_checkpoint_is_accepted_with_other_times(tmp_path: Path) -> None:
    first, second = _checkpoint(tmp_path / "first"), _checkpoint(tmp_path / "second")
    os.utime(second / "config.json", (1, 1))
    _join(second, checkpoint_digest(first), tmp_path)


@pytest.mark.parametrize("change", ["config", "weights", "file"])
def test_another_model_at_the_path_is_refused(tmp_path: Path, change: str) -> None:
    first, second = _checkpoint(tmp_path / "first"), _checkpoint(tmp_path / "second")
    match change:
        case "config":
            (second / "config.json").write_text('{"model_type": "qwen2"}')
        case "weights":
            (second / "model.safetensors").write_bytes(bytes(2**20))
        case _:
            (second / "adapter.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{gethostname()} has another model at {second} than the head machine"):
        _join(second, checkpoint_digest(first), tmp_path)


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    digest = checkpoint_digest(_checkpoint(tmp_path / "first"))
    with pytest.raises(ConfigError, match=r"cannot read the model .*: No such file or directory: it must be at"):
        _join(tmp_path / "second", digest, tmp_path)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other machines have no shared memory group")
def test_a_joined_group_leaves_no_file(tmp_path: Path) -> None:
    config = make_config(tensor_parallel_size=2)
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: join_group(config, rank, tmp_path / "ranks-1"), range(2)))
    assert [group.rank for group in groups] == [0, 1] and not list(tmp_path.iterdir())


def test_an_address_that_no_interface_has_is_one_line(tmp_path: Path) -> None:
    link = WorkerLink(
        address="tcp://10.0.0.1:1", scheduler_key="", public_key="", secret_key="",
        rendezvous="tcp://192.0.2.77:1", own_address="192.0.2.77",
    )  # fmt: skip
    config = make_config(tensor_parallel_size=2)
    with pytest.raises(EngineError, match=r"no network interface of .* has the address 192\.0\.2\.77"):
        join_group(config, 0, tmp_path / "ranks-1", link)
