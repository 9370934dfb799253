"""What a worker on a node checks before it joins its group."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scheduler_driver import make_config

from quire.protocol.errors import EngineError
from quire.protocol.nodes import WorkerLink
from quire.worker_proc.parallel.join import join_group


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
