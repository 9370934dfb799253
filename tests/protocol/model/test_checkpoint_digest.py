"""The fingerprint of a checkpoint: every change of a byte changes it, also where size and mtime do not."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from scheduler_driver import make_config
from tiers import thinned

from quire.protocol.model import checkpoint_digest as module
from quire.protocol.model.checkpoint_digest import begin_digest, checkpoint_digest, checkpoint_state
from quire.scheduler_proc.process.fingerprint import fingerprint

Change = Callable[[Path, Path], object]
DATA = bytes(range(256)) * 5000
"""Longer than a chunk."""


@pytest.fixture(autouse=True)
def keeps_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", -(2**63))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kept_files(tmp_path: Path, suffix: str = ".json") -> list[Path]:
    return sorted((tmp_path / "cache" / "quire" / "checkpoints").glob(f"*{suffix}"))


def checkpoint(place: Path, kind: str) -> tuple[Path, Path]:
    """Return a checkpoint's path, and the file whose bytes are changed."""
    folder = place / "snapshots" / "one"
    folder.mkdir(parents=True)
    if kind == "gguf":
        (folder / "model.gguf").write_bytes(DATA)
        return folder / "model.gguf", folder / "model.gguf"
    (folder / "config.json").write_text("{}")
    names = ["model-1.safetensors", "model-2.safetensors"] if kind == "shards" else ["model.safetensors"]
    for name in names:
        (folder / name).write_bytes(DATA)
    if kind == "links":
        (place / "blobs").mkdir()
        target = place / "blobs" / "weights"
        (folder / names[0]).rename(target)
        (folder / names[0]).symlink_to(target)
    return folder, folder / names[-1]


def flip(at: int) -> Change:
    def change(path: Path, file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes([DATA[at] ^ 1]))

    return change


def replace(data: bytes) -> Change:
    def change(path: Path, file: Path) -> None:
        other = file.with_name("other")
        other.write_bytes(data)
        other.replace(file.resolve())

    return change


CHANGES: dict[str, tuple[Change, bool]] = {
    "first byte": (flip(0), True),
    "a byte between": (flip(700_001), True),
    "last byte": (flip(len(DATA) - 1), True),
    "another file": (replace(DATA[::-1]), True),
    "a copy": (replace(DATA), False),
    "longer": (lambda path, file: file.write_bytes(DATA + b"\0"), True),
    "shorter": (lambda path, file: file.write_bytes(DATA[:-1]), True),
    "empty": (lambda path, file: file.write_bytes(b""), True),
    "written again": (lambda path, file: file.write_bytes(DATA), False),
    "mode": (lambda path, file: file.chmod(0o600), False),
    "one file more": (lambda path, file: (file.parent / "more.json").write_text("{}"), True),
    "a file that is not read": (lambda path, file: (file.parent / "README.md").write_text("{}"), False),
}
KEPT: dict[str, Callable[[list[Path]], object]] = {
    "kept": lambda files: None,
    "damaged": lambda files: [file.write_bytes(b'{"x": 1, \xff') for file in files],
    "lost": lambda files: [file.unlink() for file in files],
}
CASES = [(kind, name, kept) for kind in ("one", "shards", "links", "gguf") for name in CHANGES for kept in KEPT]


@pytest.mark.parametrize(("kind", "name", "kept"), thinned(CASES, 48))
def test_changed_bytes_are_seen_with_and_without_kept_hashes(kind: str, name: str, kept: str, tmp_path: Path) -> None:
    path, file = checkpoint(tmp_path, kind)
    change, is_other = CHANGES[name]
    is_other &= not (kind == "gguf" and name == "one file more")
    first, times = checkpoint_digest(path), file.stat()
    assert first.state == checkpoint_state(path) and checkpoint_digest(path) == first
    KEPT[kept](kept_files(tmp_path))
    change(path, file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    while file.stat().st_ctime_ns == times.st_ctime_ns:  # until the clock of the file system ticks
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = checkpoint_digest(path)
    assert second.state == checkpoint_state(path) != first.state
    assert (second.digest != first.digest) == is_other
    for each in kept_files(tmp_path):
        each.unlink()
    assert checkpoint_digest(path) == second, "what was kept is what the files have"


def test_files_are_read_once_and_their_hashes_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, file = checkpoint(tmp_path, "shards")
    read: list[int] = []
    real = module._hash
    monkeypatch.setattr(module, "_hash", lambda fd: (read.append(fd), real(fd))[1])
    first = begin_digest(path).result(30)
    assert len(read) == 3 and begin_digest(path).result(30) == first and len(read) == 3
    flip(5)(path, file)
    os.utime(file, (1, 1))
    assert checkpoint_digest(path).digest != first.digest and len(read) == 4, "only the changed file is read"
    (kept,) = kept_files(tmp_path)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600 and stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    kept.parent.chmod(0o777)
    kept.write_text("{}")
    again = checkpoint_digest(path)
    assert len(read) == 7 and again.digest != first.digest, "nothing is kept where others may write"
    monkeypatch.setattr(module, "SETTLED_NS", 2**62)
    kept.parent.chmod(0o700)
    assert checkpoint_digest(path) == checkpoint_digest(path) == again and len(read) == 13
    assert kept.read_text() == "{}", "a file that has just changed may change again in the same tick"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("none"),
        lambda path: Path(os.fsdecode(os.fsencode(path.parent) + b"/\xff.json")).write_text("{}"),
    ],
    ids=["folder", "pipe", "broken link", "not UTF-8"],
)
def test_odd_files_beside_the_weights_stop_nothing(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path, _ = checkpoint(tmp_path, "one")
    make(path / "odd.json")
    assert begin_digest(path).result(30) == (checkpoint_digest(path).digest, checkpoint_state(path))
    assert fingerprint(make_config(model_path=str(path)))


def test_the_result_of_a_thread_is_awaited_never_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "checkpoint_files", lambda path: 1 / 0)
    assert begin_digest(tmp_path).result(30) == ("", "")


def test_no_other_user_may_write_to_the_folder_of_the_cache(tmp_path: Path) -> None:
    """There are compiled kernels beside the hashes, which are not used then."""
    path, _ = checkpoint(tmp_path, "one")
    before = os.umask(0)
    try:
        checkpoint_digest(path)
    finally:
        os.umask(before)
    (kept,) = kept_files(tmp_path)
    assert not any(stat.S_IMODE(each.stat().st_mode) & 0o077 for each in (kept, kept.parent, kept.parent.parent))


def test_files_that_change_while_they_are_read_have_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = checkpoint(tmp_path, "gguf")
    real = module._hash

    def changing(fd: int) -> str:
        found = real(fd)
        file.write_bytes(DATA[:-7])
        return found

    monkeypatch.setattr(module, "_hash", changing)
    assert begin_digest(path).result(30) == ("", "")
    assert begin_digest(tmp_path / "missing").result(30) == ("", "")
