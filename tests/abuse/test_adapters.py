"""Adapters: hostile names, paths and folders, of clients that may name adapters and of administrators."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from abuse import COMPLETIONS, assert_refused
from abused_app import AbusedApp
from adapters import make_adapter
from grammar_cases import demo_config

from quire.frontend.adapters.names import NameTable, table_path
from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.adapters.served_adapters import ServedAdapters
from quire.frontend.http.routes.load_adapters import PATHS

LOAD, UNLOAD = PATHS
ADMIN = {"authorization": "Bearer admin"}
MODEL = demo_config().model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def shared(root: Path) -> Iterator[AbusedApp]:
    """An application with an administrator, whose folder of adapters has ``good`` and lies beside ``outside``."""
    make_adapter(root / "all" / "good", MODEL)
    make_adapter(root / "outside", MODEL)
    adapters = ServedAdapters(AdapterReader(MODEL, 64), NameTable(table_path(root)), root / "all")
    app = AbusedApp(adapters=adapters, admin_api_keys=("admin",))
    yield app
    app.close()


@pytest.fixture
def adapted(shared: AbusedApp, root: Path) -> Iterator[AbusedApp]:
    yield shared
    shared.check()
    assert shared.complete(model="good").status_code == 200
    assert set(NameTable(table_path(root)).names()) <= {"good"}


NAMES = (
    *("../outside", "..", ".", "/", "", "good/", "good/.", "./good", "/etc", "..\\outside", "good\x00", "good\n", " "),
    *("good/../../outside", "%2e%2e/outside", "file:///etc", "~", "~root", "$HOME", "*", "go?d", "\x1b[2J"),
    *("\u202egood", "é" * 255, "x" * 256, "x" * 10**6, "GOOD", "good.", "\\\\?\\good", "CON"),
)


def test_names_open_nothing_outside_the_folder(adapted: AbusedApp) -> None:
    for name in NAMES:
        error = assert_refused(adapted.complete(model=name), 404, "model", "does not exist")
        assert error["code"] == "model_not_found"
        assert_refused(adapted.request("GET", f"/v1/models/{quote(name[:300], safe='')}_"), 404)


LOADS: tuple[Any, ...] = (
    *({}, {"lora_name": "x"}, {"lora_path": "/x"}, {"lora_name": "x", "lora_path": None}),
    *({"lora_name": value, "lora_path": "/x"} for value in (0, True, [], {}, "", "/a", ".x", "x" * 257, "a\nb")),
    *({"lora_name": "x", "lora_path": value} for value in (0, [], {}, "", "a\0b", "/x" * 5000, "\x1b[31m", "\u202e")),
    {"lora_name": "x", "lora_path": "/x", "load_inplace": "yes"},
    {"lora_name": "x", "lora_path": "/x", "lora_int_id": 1},
    {"lora_name": "quire-demo", "lora_path": "/x"},
)
FOLDERS_WITHOUT_ADAPTERS = ("/", "/etc", "/proc/self", "../../../../../../../../etc", ".")
PATHS = (
    *("/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/fd/0", "http://x/y", "s3://x/y", "hf://a/b", "a/b", "~"),
    *("~/x", "$HOME", "*", "//x//y", "x" * 300, "/nowhere/" + "y" * 255, "/etc/passwd/x", "/proc/self/mem"),
)


def test_loads(adapted: AbusedApp) -> None:
    for body in LOADS:
        assert_refused(adapted.post(LOAD, body, headers=ADMIN), 400)
    for path in (*PATHS, *FOLDERS_WITHOUT_ADAPTERS):
        status, code = (404, "adapter_not_found") if path in PATHS else (400, "invalid_adapter")
        answer = adapted.post(LOAD, {"lora_name": "x", "lora_path": path}, headers=ADMIN)
        assert assert_refused(answer, status, "lora_path")["code"] == code
    for name in NAMES:
        assert_refused(adapted.post(UNLOAD, {"lora_name": name}, headers=ADMIN), 404)
    for value in (0, True, [], {}, None):
        assert_refused(adapted.post(UNLOAD, {"lora_name": value}, headers=ADMIN), 400)


def write(name: str, data: bytes | str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def settings(**changes: Any) -> Callable[[Path], object]:
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **changes}
    return write(CONFIG, json.dumps(whole))


def header(text: str, rest: bytes = b"") -> Callable[[Path], object]:
    return write(WEIGHTS, len(text).to_bytes(8, "little") + text.encode() + rest)


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FOLDERS: tuple[Callable[[Path], object], ...] = (
    *(write(CONFIG, text) for text in ("", "[]", "{", "null", "[" * 10**5, '{"peft_type": "LORA"}', b"\xff\xfe")),
    *(settings(r=value) for value in (0, -1, 65, 10**30, True, "4", None, 1.5, [])),
    *(settings(lora_alpha=value) for value in (-1, "x", None, [])),
    settings(rank_pattern={"[^a]{999}" * 28: 4}),
    settings(rank_pattern={"(": 4}),
    settings(rank_pattern={f"x{i}": 4 for i in range(5000)}),
    settings(auto_mapping={"x": "y"}, peft_type="PROMPT_TUNING"),
    *(write(WEIGHTS, data) for data in (b"", b"\0" * 8, b"\xff" * 64, b"PK\x03\x04" * 100, b"\x80\x04." * 50)),
    *(header(text) for text in ("{", "[]", "7", '{"a": 1}', "[" * 10**5, '{"__metadata__": {}}')),
    *(
        header(json.dumps({Q: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}), bytes(64))
        for dtype, shape, offsets in (
            ("F32", [4, 4], [0, 10**18]),
            ("F32", [4, 4], [-64, 0]),
            ("F32", [4, 4], [64, 0]),
            ("F32", [2**40, 2**40], [0, 64]),
            ("F32", [-4, -4], [0, 64]),
            ("F32", [16], [0, 64]),
            ("F32", [], [0, 4]),
            ("I8", [8, 8], [0, 64]),
            ("X" * 10**5, [4, 4], [0, 64]),
        )
    ),
    replaced(WEIGHTS, os.mkfifo),
    replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero")),
    replaced(WEIGHTS, lambda path: path.symlink_to("/etc/passwd")),
    replaced(CONFIG, lambda path: path.symlink_to(path)),
    replaced(CONFIG, Path.mkdir),
)


def test_folders(adapted: AbusedApp, root: Path) -> None:
    for number, change in enumerate(FOLDERS):
        change(make_adapter(root / "all" / f"bad-{number}", MODEL))
        with adapted.in_time():
            for body in ({"model": f"bad-{number}"}, {"model": f"bad-{number}", "stream": True}):
                answer = adapted.post(COMPLETIONS, {"prompt": [5], **body})
                error = assert_refused(answer, 400, "model")
                assert (error["code"], str(root) in error["message"]) == ("invalid_adapter", False), error
