"""A socket finds out that another file has taken the place of its own, also one with the same inode number."""

from pathlib import Path

import pytest
import zmq

from quire.scheduler_proc.process.sockets import SocketFile


@pytest.mark.parametrize("replaces", [False, True])
def test_a_file_that_was_removed_or_replaced_is_bound_again(replaces: bool, tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    address = f"ipc://{path}"
    with zmq.Context() as context, context.socket(zmq.PAIR) as own, context.socket(zmq.PAIR) as peer:
        own.bind(SocketFile.unnamed(address))
        file = SocketFile(own, address)
        assert path.is_socket()
        before = path.stat().st_ino
        file.reclaim()
        assert path.stat().st_ino == before, "nothing had changed"
        path.unlink()
        if replaces:  # as an exited process leaves it
            with zmq.Context() as others, others.socket(zmq.PAIR) as other:
                other.bind(address)
            assert path.is_socket() and path.stat().st_ino != before
        file.reclaim()
        peer.connect(address)
        peer.send(b"found")
        assert own.poll(30_000) and own.recv() == b"found"
