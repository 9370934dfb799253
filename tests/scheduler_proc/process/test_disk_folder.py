"""The folder of the disk tier: what it refuses, and what it keeps."""

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scheduler_driver import make_config

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.wire.transfer_messages import DiskContents
from quire.scheduler_proc.process import disk_folder
from quire.scheduler_proc.process.disk_folder import MAGIC, SECTOR, DiskFolder
from quire.scheduler_proc.process.fingerprint import SETTINGS, fingerprint
from quire.scheduler_proc.process.worker_group import common_contents

PAGE = 2 * SECTOR


def config_at(path: Path, num_pages: int = 10, **settings: Any) -> EngineConfig:
    sizes = {"tensor_parallel_size": 2, "ssd_cache_bytes": num_pages * 2 * PAGE}
    return make_config(ssd_cache_dir=str(path), **sizes, **settings)


@contextmanager
def opened(path: Path, num_pages: int = 10, **settings: Any) -> Iterator[DiskFolder]:
    folder = DiskFolder(config_at(path, num_pages, **settings))
    try:
        folder.open([PAGE, PAGE])
        yield folder
    finally:
        folder.close()


def test_files_are_allocated_and_private(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "folder") as folder:
        assert folder.num_pages == 10 and folder.forgotten == 0
        assert [path.name for path in folder.paths] == ["rank-0-of-2.pages", "rank-1-of-2.pages"]
        for path in folder.paths:
            info = path.stat()
            assert info.st_size == info.st_blocks * 512 == 10 * PAGE and stat.S_IMODE(info.st_mode) == 0o600
        assert stat.S_IMODE(folder.paths[0].parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(("num_pages", "kept"), [(10, 9), (4, 3), (30, 9)])
def test_contents_that_fit_are_kept(tmp_path: Path, num_pages: int, kept: int) -> None:
    with opened(tmp_path) as folder:
        data = b"".join(bytes([page]) * PAGE for page in range(1, 10))
        for path in folder.paths:
            with path.open("r+b") as file:
                file.seek(PAGE)
                file.write(data)
        folder.forget(7)
    with opened(tmp_path, num_pages) as folder:
        assert folder.num_pages == num_pages and folder.forgotten == 7
        for path in folder.paths:
            assert path.read_bytes()[PAGE:] == data[: kept * PAGE] + bytes((num_pages - 1 - kept) * PAGE)
        folder.wipe([2, 3])
        found = folder.paths[1].read_bytes()
        assert found[2 * PAGE :][:SECTOR] == found[3 * PAGE :][:SECTOR] == bytes(SECTOR)
        assert found[3 * PAGE + SECTOR : 4 * PAGE] == data[2 * PAGE + SECTOR : 3 * PAGE]


@pytest.mark.parametrize("cut", [len(MAGIC), len(MAGIC) + 20, len(MAGIC) + 100])
def test_a_torn_description_drops_the_contents(tmp_path: Path, cut: int) -> None:
    """What has been forgotten is not known any more."""
    with opened(tmp_path) as folder:
        folder.forget(5)
        path = folder.paths[0]
        whole = path.read_bytes()
        path.write_bytes(whole[:cut] + b"\0" * (len(whole) - cut - 8) + b"content!")
    with opened(tmp_path) as folder:
        assert folder.paths[0].read_bytes()[PAGE:] == bytes(9 * PAGE)
        assert folder.forgotten == 5, "the other rank's file has it"
    with opened(tmp_path) as folder:
        assert folder.forgotten == 5


def test_dropping_that_was_interrupted_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To free the blocks of a large file can take longer than the engine waits for the disk."""
    with opened(tmp_path) as folder:
        path = folder.paths[0]
        path.write_bytes(MAGIC + b"torn".ljust(10 * PAGE, b"x"))

    def end(file: int, size: int) -> None:
        raise OSError(errno.EIO, "the engine has ended")

    with monkeypatch.context() as patch:
        patch.setattr(disk_folder, "_resize", end)
        with pytest.raises(ConfigError, match="the engine has ended"), opened(tmp_path):
            pass
    with opened(tmp_path):
        assert path.read_bytes()[PAGE:] == bytes(9 * PAGE)


def test_a_reset_that_reached_one_rank_only_holds(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        before = folder.paths[1].read_bytes()
        folder.forget(5)
        folder.paths[1].write_bytes(before)
    with opened(tmp_path) as folder:
        assert folder.forgotten == 5


def test_a_creation_that_was_interrupted_is_repeated(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        path = folder.paths[0]
        path.rename(path.with_suffix(".new"))
    with opened(tmp_path) as folder:
        assert path.stat().st_size == 10 * PAGE and not path.with_suffix(".new").exists()


@pytest.mark.parametrize("content", [b"", b"some other file" * 1000, bytes(PAGE)])
def test_files_of_others_are_refused(tmp_path: Path, content: bytes) -> None:
    with opened(tmp_path) as folder:
        path = folder.paths[0]
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rank-0-of-2.pages is not a file of Quire: remove it"):
        DiskFolder(config_at(tmp_path))
    assert path.read_bytes() == content


def test_a_renamed_folder_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        one = folder.paths[0].parent
    with opened(tmp_path, dtype="bfloat16") as folder:
        other = folder.paths[0].parent
        folder.paths[0].unlink()
    (one / "rank-0-of-2.pages").rename(other / "rank-0-of-2.pages")
    with pytest.raises(ConfigError, match="another model or configuration, so its folder was renamed"):
        DiskFolder(config_at(tmp_path, dtype="bfloat16"))


def test_a_second_engine_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="another engine uses"):
        DiskFolder(config_at(tmp_path))
    with opened(tmp_path):
        pass


def test_fewer_than_two_pages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--ssd-cache-bytes must be at least {4 * PAGE}"), opened(tmp_path, 1):
        pass
    assert not list(tmp_path.rglob("*.pages"))


def test_pages_of_another_size_are_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.forget(5)
        with folder.paths[0].open("r+b") as file:
            file.seek(2 * PAGE)
            file.write(b"content")
    folder = DiskFolder(config_at(tmp_path))
    folder.open([SECTOR, SECTOR])
    folder.close()
    assert (folder.num_pages, folder.forgotten) == (20, 5)
    assert not any(folder.paths[0].read_bytes()[SECTOR:])


def test_the_room_counts_what_the_files_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known before the size of a page is."""
    with opened(tmp_path):
        pass
    found = os.statvfs(tmp_path)
    full = type("Full", (), {"f_bavail": 3, "f_frsize": found.f_frsize})
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with opened(tmp_path):
        pass
    room = 20 * PAGE + 2 * PAGE + 3 * found.f_frsize
    with pytest.raises(
        ConfigError, match=rf"--ssd-cache-bytes must be at most {room}, the room in .* \(got {80 * PAGE}"
    ):
        DiskFolder(config_at(tmp_path, 40))


def hang(release: threading.Event) -> Callable[..., Any]:
    def hung(*given: object) -> None:
        assert release.wait(30)

    return hung


def test_a_disk_that_does_not_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(disk_folder, "START_S", 0.05)
    monkeypatch.setattr(os, "statvfs", hang(release))
    with pytest.raises(ConfigError, match=r"cannot be used: the disk does not answer within 0\.05 s: choose"):
        DiskFolder(config_at(tmp_path))
    release.set()


def test_what_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forgetting nor what follows it waits again."""
    release = threading.Event()
    monkeypatch.setattr(disk_folder, "ANSWER_S", 0.05)
    with opened(tmp_path) as folder, monkeypatch.context() as hung:
        hung.setattr(os, "pwrite", hang(release))
        folder.wipe([1])
        assert not any(path.exists() for path in folder.paths)
        hung.setattr(os, "pwrite", None)
        folder.wipe([2])
        folder.forget(3)
        release.set()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_without_room_is_refused(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=f"cannot be used: {os.strerror(code)}: choose .* room for {20 * PAGE} bytes"):
        DiskFolder(config_at(tmp_path)).open([PAGE, PAGE])
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"/file must be a folder, not a link, that belongs to this user and that"):
        DiskFolder(config_at(tmp_path / "file"))


@pytest.mark.parametrize(
    ("place", "mode"), [("", 0o777), ("", 0o1777), ("", 0o720), ("model", 0o770), ("model", 0o705), ("model", 0o710)]
)
def test_folders_that_others_may_use_are_refused(tmp_path: Path, place: str, mode: int) -> None:
    with opened(tmp_path / "cache") as folder:
        changed = folder.paths[0].parent if place else tmp_path / "cache"
        content = folder.paths[0].read_bytes()
    changed.chmod(mode)
    with pytest.raises(ConfigError, match=f"--ssd-cache-dir: {changed} must be a folder, not a link, that belongs"):
        DiskFolder(config_at(tmp_path / "cache"))
    assert folder.paths[0].read_bytes() == content


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_the_folder_of_several_engines_is_the_users_own(tmp_path: Path, mode: int) -> None:
    config = config_at(tmp_path / "engine-1", data_parallel_rank=1)
    tmp_path.chmod(mode)
    with nullcontext() if mode == 0o755 else pytest.raises(ConfigError, match=f": {tmp_path} must be .* a new folder"):
        DiskFolder(config).close()


def test_folders_of_others_and_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as folder:
        model = folder.paths[0].parent
    with monkeypatch.context() as patch:
        owner = os.getuid()
        patch.setattr(os, "getuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match="must be a folder, not a link, that belongs to this user"):
            DiskFolder(config_at(tmp_path / "cache"))
    model.rename(tmp_path / "elsewhere")
    model.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="must be a folder, not a link, that belongs to this user"):
        DiskFolder(config_at(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["lock", "rank-0-of-2.pages", "rank-0-of-2.new"])
def test_no_file_is_reached_through_a_link(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    with opened(tmp_path / "cache") as folder:
        place = folder.paths[0].with_name(name)
        target.write_bytes(folder.paths[0].read_bytes())
    folder.paths[0].unlink()
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    before = target.read_bytes()
    if name.endswith(".new"):
        with opened(tmp_path / "cache"):
            assert not folder.paths[0].is_symlink() and not place.exists(), "the link is removed, and a file made"
    else:
        with pytest.raises(ConfigError, match=f"{place} cannot be used: Too many levels of symbolic links"):
            DiskFolder(config_at(tmp_path / "cache"))
    assert target.read_bytes() == before


@pytest.mark.parametrize("action", ["forget", "wipe"])
def test_what_cannot_be_forgotten_is_removed(tmp_path: Path, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path) as folder:
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", fail)
            folder.forget(5) if action == "forget" else folder.wipe([1])
        assert not any(path.exists() for path in folder.paths)


# ---- the fingerprint


OTHERS = """
    async_scheduling chat_template closed_objects cpu_offload_bytes crash_dump_dir enable_chunked_prefill
    data_parallel_rank data_parallel_size feeds_router head_key_file ranks
    enable_lora enable_prefix_caching enable_prompt_embeds enable_return_routed_experts encoder_cache_tokens
    enforce_eager fair_admission gpu_memory_utilization kv_cache_memory_bytes
    kv_events_curve_dir kv_events_endpoint kv_events_format kv_events_replay_endpoint kv_events_topic
    kv_events_without_keys kv_page_check kv_pressure_high kv_pressure_low
    learned_costs_dir logits_processors
    logits_processors_exclude logprobs_mode long_prefill_token_threshold max_cpu_loras max_lora_rank max_loras
    max_model_len max_num_batched_tokens
    max_num_queued_reqs max_num_scheduled_tokens max_num_seqs max_prefill_share
    model_path num_blocks_override num_speculative_tokens
    max_programs priority_range reserve_full_sequence sampling_defaults scheduling_policy seed
    speculative ssd_cache_bytes ssd_cache_dir state_slots structured_outputs_backend thinking_end_token_ids
    thinking_start_token_ids trace trace_max_bytes trace_prompts watermark
"""
"""Settings that change neither weights, nor keys and values, nor what a block hash covers."""


def test_each_setting_is_in_the_fingerprint_or_does_not_matter() -> None:
    assert sorted(SETTINGS) == sorted(set(EngineConfig.__struct_fields__) - set(OTHERS.split()))


def checkpoint(path: Path) -> Path:
    path.mkdir()
    for name, size in (("config.json", 10), ("model.safetensors", 300_000), ("notes.txt", 5)):
        (path / name).write_bytes(b"x" * size)
        os.utime(path / name, (1, 1))
    return path


def test_the_fingerprint_names_settings_and_files(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    config = make_config(model_path=str(folder))
    first = fingerprint(config)
    changed = [{"dtype": "float16"}, {"load_format": "dummy"}, {"block_size": 8}, {"version": "other"}]
    changed += [{"model": msgspec.structs.replace(config.model, num_layers=3)}]
    found = [fingerprint(msgspec.structs.replace(config, **change)) for change in changed]
    (folder / "notes.txt").write_text("changed")
    assert fingerprint(msgspec.structs.replace(config, max_num_seqs=3, seed=5)) == first
    weights = folder / "model.safetensors"
    os.utime(weights, (2, 2))
    found.append(fingerprint(config))
    weights.write_bytes(bytes(300_001))
    os.utime(weights, (2, 2))
    found.append(fingerprint(config))
    weights.rename(folder / "renamed.safetensors")
    found.append(fingerprint(config))
    assert len({first, *found}) == 1 + len(found)
    dummy = msgspec.structs.replace(config, load_format="dummy")
    assert fingerprint(dummy) != fingerprint(msgspec.structs.replace(dummy, seed=1))
    assert fingerprint(make_config(model_path=str(weights.with_name("renamed.safetensors")))) != first
    with pytest.raises(ConfigError, match=r"the checkpoint .* cannot be read"):
        fingerprint(make_config(model_path=str(folder / "missing")))


# ---- the contents of all ranks


def contents(*rows: tuple[int, int, int, int], reason: str = "") -> DiskContents:
    """``rows``: page, generation, group, first byte of the key."""
    pages, generations, groups, keys = zip(*rows, strict=True) if rows else ((), (), (), ())
    named = b"".join(bytes([key]) * 16 for key in keys)
    return DiskContents(
        np.array(pages, np.int32), np.array(generations, np.int64), named, np.array(groups, np.int32), reason
    )


def rows_of(found: DiskContents) -> list[tuple[int, int, int, int]]:
    groups = [0] * len(found.page_ids) if found.groups is None else found.groups.tolist()
    return list(zip(found.page_ids.tolist(), found.generations.tolist(), groups, found.keys[::16], strict=True))


def test_a_page_counts_only_if_all_ranks_agree() -> None:
    one = contents((1, 5, 0, 7), (2, 6, 1, 8), (3, 7, 0, 9), (4, 8, 0, 10), (5, 9, 0, 11), (9, 1, 0, 3))
    two = contents((9, 1, 0, 3), (2, 6, 1, 8), (3, 70, 0, 9), (4, 8, 1, 10), (5, 9, 0, 12), (6, 1, 0, 1))
    assert rows_of(common_contents([[one], [two]])) == [(9, 1, 0, 3), (2, 6, 1, 8)]
    parts = [list(each.parts(2)) for each in (one, two)]
    assert [len(each) for each in parts] == [3, 3] and [part.is_last for part in parts[0]] == [False, False, True]
    assert rows_of(common_contents(parts)) == [(9, 1, 0, 3), (2, 6, 1, 8)]
    assert rows_of(common_contents([*parts, [contents((9, 1, 0, 3))]])) == [(9, 1, 0, 3)]
    for nothing in (contents(), contents((2, 1, 0, 8))):
        assert rows_of(common_contents([[one], [nothing]])) == rows_of(common_contents([[nothing], [two]])) == []


def test_a_reason_of_any_rank_is_that_of_all() -> None:
    found = common_contents([[contents((1, 5, 0, 7))], [contents(reason="no such file")]])
    assert (rows_of(found), found.reason) == ([], "no such file")
