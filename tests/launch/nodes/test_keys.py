"""Keys of nodes and of the head machine, as files."""

from pathlib import Path

import pytest

from quire.launch.nodes.keys import HEAD_SECRET, NODE_PUBLIC, load_head_keys, load_node_key, make_keys
from quire.protocol.errors import ConfigError
from quire.protocol.wire.curve_keys import load_curve_keys


def test_made_keys_fit_each_other(tmp_path: Path) -> None:
    node, head = make_keys(tmp_path / "keys")
    server = load_curve_keys(node, "--keys")
    assert server.public.decode() == load_node_key(head)
    assert load_head_keys(head / HEAD_SECRET).public in (server.allowed / "head.key").read_text()
    for place in (node, head, server.allowed):
        assert place.stat().st_mode & 0o777 == 0o700
    assert (head / HEAD_SECRET).stat().st_mode & 0o777 == 0o600


def test_keys_are_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--make-keys: .* cannot be made: File exists: name a new folder"):
        make_keys(tmp_path)


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        (HEAD_SECRET, 0o644, "must be a file of mode 0600"),
        (NODE_PUBLIC, 0o666, "must be a file, not a link"),
        ("", 0o755, "must be a directory of mode 0700"),
    ],
)
def test_files_that_others_can_change_are_refused(tmp_path: Path, name: str, mode: int, expected: str) -> None:
    _, head = make_keys(tmp_path / "keys")
    (head / name).chmod(mode)
    with pytest.raises(ConfigError, match=f"--node-keys: .*{expected}"):
        load_node_key(head)


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    _, head = make_keys(tmp_path / "keys")
    (head / NODE_PUBLIC).write_text("no key")
    with pytest.raises(ConfigError, match="is not a ZeroMQ key file"):
        load_node_key(head)
