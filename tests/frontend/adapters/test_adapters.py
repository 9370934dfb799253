"""Adapters by name: folders that are read once and again when they change, and errors with a code each."""

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from configs import MODEL

from quire.frontend.adapters import reader as reader_module
from quire.frontend.adapters.names import MAX_NAMES, NamedAdapter, NameTable, table_path
from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.adapters.served_adapters import ServedAdapters
from quire.protocol.errors import InvalidRequest
from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.adapter_config import AdapterError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were read."""
    found: list[str] = []

    def counted(folder: Path, *more: Any) -> Any:
        found.append(folder.name)
        return read_adapter(folder, *more)

    monkeypatch.setattr(reader_module, "read_adapter", counted)
    return found


def adapters_in(directory: Path, folder: Path | None = None) -> ServedAdapters:
    return ServedAdapters(AdapterReader(MODEL, 64), NameTable(table_path(directory)), folder)


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def call() -> Any:
        return await work()

    return asyncio.run(call())


def code_of(work: Callable[[], Awaitable[Any]]) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as refused:
        run(work)
    return refused.value.code, refused.value.param


class TestFolders:
    def test_a_folder_is_read_on_first_use_and_once(self, tmp_path: Path, reads: list[str]) -> None:
        digest = read_adapter(make_adapter(tmp_path / "a", MODEL), MODEL, 64).digest
        adapters = adapters_in(tmp_path, tmp_path)

        async def ask() -> list[Any]:
            return [*await asyncio.gather(*(adapters.find("a") for _ in range(5))), await adapters.find("a")]

        found = run(ask)
        assert {(each.name, each.digest, each.path) for each in found} == {("a", digest, str(tmp_path / "a"))}
        assert reads == ["a"]

    def test_other_content_is_another_adapter(self, tmp_path: Path, reads: list[str]) -> None:
        make_adapter(tmp_path / "a", MODEL)
        adapters = adapters_in(tmp_path, tmp_path)
        first = run(lambda: adapters.find("a"))
        make_adapter(tmp_path / "a", MODEL, seed=1)
        second = run(lambda: adapters.find("a"))
        assert first.digest != second.digest
        assert reads == ["a", "a"]

    def test_the_same_content_elsewhere_is_the_same_adapter(self, tmp_path: Path) -> None:
        shutil.copytree(make_adapter(tmp_path / "a", MODEL), tmp_path / "b")
        adapters = adapters_in(tmp_path, tmp_path)
        assert run(lambda: adapters.find("a")).digest == run(lambda: adapters.find("b")).digest

    @pytest.mark.parametrize("name", ["none", "../a", "a/", "b/../b", "b/.", ".a", "", "a\0", "é" * 200, "x" * 10**6])
    def test_unknown_names(self, tmp_path: Path, name: str) -> None:
        make_adapter(tmp_path / "in" / "b", MODEL)
        make_adapter(tmp_path / "a", MODEL)
        adapters = adapters_in(tmp_path, tmp_path / "in")
        assert code_of(lambda: adapters.find(name)) == ("model_not_found", "model")

    def test_a_bad_adapter_is_read_once_and_names_no_path(self, tmp_path: Path, reads: list[str]) -> None:
        make_adapter(tmp_path / "bad", MODEL, settings={"use_dora": True})
        adapters = adapters_in(tmp_path, tmp_path)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="DoRA is not supported") as refused:
                run(lambda: adapters.find("bad"))
            assert (refused.value.code, refused.value.param) == ("invalid_adapter", "model")
            assert str(tmp_path) not in refused.value.message
        assert reads == ["bad"]
        make_adapter(tmp_path / "bad", MODEL)
        assert run(lambda: adapters.find("bad")).name == "bad"

    def test_a_file_that_changes_while_it_is_read_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_adapter(tmp_path / "a", MODEL)

        def changed(folder: Path, *more: Any) -> Any:
            found = read_adapter(folder, *more)
            make_adapter(folder, MODEL, seed=2)
            return found

        adapters = adapters_in(tmp_path, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(reader_module, "read_adapter", changed)
            first = run(lambda: adapters.find("a"))
        second = run(lambda: adapters.find("a"))
        assert second.digest == read_adapter(tmp_path / "a", MODEL, 64).digest != first.digest

    def test_a_link_is_followed_when_the_adapter_is_named(self, tmp_path: Path) -> None:
        make_adapter(tmp_path / "v1", MODEL)
        (tmp_path / "latest").symlink_to("v1")
        adapters = adapters_in(tmp_path, tmp_path)
        assert run(lambda: adapters.find("latest")).path == str(tmp_path / "v1")

    def test_a_read_that_hangs_delays_nothing_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_adapter(tmp_path / "slow", MODEL)
        make_adapter(tmp_path / "fast", MODEL)
        going = threading.Event()

        def slow(folder: Path, *more: Any) -> Any:
            if folder.name == "slow":
                going.wait(10)
            return read_adapter(folder, *more)

        monkeypatch.setattr(reader_module, "read_adapter", slow)
        adapters = adapters_in(tmp_path, tmp_path)

        async def ask() -> None:
            gone = asyncio.create_task(adapters.find("slow"))
            waiting = asyncio.create_task(adapters.find("slow"))
            assert (await adapters.find("fast")).name == "fast"
            assert not waiting.done()
            gone.cancel()  # its client disconnects; the other one waits on
            going.set()
            assert (await waiting).name == "slow"

        run(ask)

    def test_a_folder_that_cannot_be_listed_has_no_adapters(self, tmp_path: Path) -> None:
        assert run(lambda: adapters_in(tmp_path, tmp_path / "none").listed()) == []


class TestLoaded:
    def test_a_name_stands_for_the_loaded_content(self, tmp_path: Path) -> None:
        adapters, other = adapters_in(tmp_path), adapters_in(tmp_path)
        folder = make_adapter(tmp_path / "a", MODEL)
        assert not other.may_have("sql")
        loaded = run(lambda: adapters.load("sql", str(folder), replace=False))
        assert (loaded.name, loaded.rank, loaded.path) == ("sql", 4, str(folder))
        make_adapter(folder, MODEL, seed=1)
        assert other.may_have("sql")
        assert run(lambda: other.find("sql")).digest == loaded.digest
        assert [each.name for each in run(other.listed)] == ["sql"]

    def test_loading_again(self, tmp_path: Path) -> None:
        adapters = adapters_in(tmp_path)
        first, second = (str(make_adapter(tmp_path / f"v{i}", MODEL, seed=i)) for i in (1, 2))
        old = run(lambda: adapters.load("sql", first, replace=False))
        assert run(lambda: adapters.load("sql", first, replace=False)).digest == old.digest
        assert code_of(lambda: adapters.load("sql", second, replace=False)) == ("adapter_exists", "lora_name")
        new = run(lambda: adapters.load("sql", second, replace=True))
        assert run(lambda: adapters.find("sql")).digest == new.digest != old.digest

    def test_forgotten_names_are_unknown_everywhere(self, tmp_path: Path) -> None:
        adapters, other = adapters_in(tmp_path), adapters_in(tmp_path)
        run(lambda: adapters.load("sql", str(make_adapter(tmp_path / "a", MODEL)), replace=False))
        run(lambda: other.forget("sql"))
        run(lambda: other.forget("sql"))
        assert not adapters.may_have("sql")
        assert code_of(lambda: adapters.find("sql")) == ("model_not_found", "model")

    def test_refusals(self, tmp_path: Path) -> None:
        adapters = adapters_in(tmp_path)
        bad = make_adapter(tmp_path / "bad", MODEL, rank=65)
        (tmp_path / "file").touch()
        for name, path, code, param in (
            ("/a", str(bad), "invalid_value", "lora_name"),
            ("a", "", "invalid_value", "lora_path"),
            ("a", "x\0y", "invalid_value", "lora_path"),
            ("a", "/x" * 4096, "invalid_value", "lora_path"),
            ("a", str(tmp_path / "none"), "adapter_not_found", "lora_path"),
            ("a", str(tmp_path / "file"), "adapter_not_found", "lora_path"),
            ("a", "http://x/y", "adapter_not_found", "lora_path"),
            ("a", str(bad), "invalid_adapter", "lora_path"),
            ("a", str(tmp_path), "invalid_adapter", "lora_path"),
        ):
            assert code_of(lambda name=name, path=path: adapters.load(name, path, replace=False)) == (code, param)  # type: ignore[misc]

    def test_a_name_with_a_slash_is_a_name_only(self, tmp_path: Path) -> None:
        adapters = adapters_in(tmp_path, tmp_path)
        folder = make_adapter(tmp_path / "org" / "sql", MODEL)
        assert not adapters.may_have("org/sql")
        run(lambda: adapters.load("org/sql", str(folder), replace=False))
        assert adapters.may_have("org/sql") and run(lambda: adapters.find("org/sql")).path == str(folder)
        run(lambda: adapters.forget("org/sql"))
        assert code_of(lambda: adapters.find("org/sql")) == ("model_not_found", "model")

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
    def test_a_folder_that_may_not_be_read(self, tmp_path: Path) -> None:
        folder = make_adapter(tmp_path / "a", MODEL)
        folder.chmod(0)
        adapters = adapters_in(tmp_path)
        assert code_of(lambda: adapters.load("a", str(folder), replace=False))[0] == "invalid_adapter"
        folder.chmod(0o700)

    def test_the_number_of_names_is_limited(self, tmp_path: Path) -> None:
        adapters, folder = adapters_in(tmp_path), make_adapter(tmp_path / "a", MODEL)
        many = [NamedAdapter(name=f"{i}", path="", digest=b"", rank=1, num_bytes=1) for i in range(MAX_NAMES)]
        NameTable(table_path(tmp_path)).change(lambda names: names.update((each.name, each) for each in many))
        assert code_of(lambda: adapters.load("a", str(folder), replace=False))[0] == "unsupported_value"


def test_known_outcomes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]) -> None:
    monkeypatch.setattr(reader_module, "MAX_KNOWN", 2)
    reader = AdapterReader(MODEL, 64)
    for name in ("a", "b", "a", "c", "a", "b"):
        reader.read(make_adapter(tmp_path / name, MODEL) if not (tmp_path / name).exists() else tmp_path / name)
    assert reads == ["a", "b", "c", "b"]


def test_errors_of_the_reader(tmp_path: Path) -> None:
    reader = AdapterReader(MODEL, 4)
    with pytest.raises(FileNotFoundError):
        reader.read(tmp_path / "none")
    with pytest.raises(AdapterError, match=r"adapter_config\.json not found"):
        reader.read(tmp_path)
    with pytest.raises(AdapterError, match=r"from 1 to 4 \(got 8\)"):
        reader.read(make_adapter(tmp_path / "a", MODEL, rank=8))
