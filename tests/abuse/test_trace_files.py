"""Malicious traces and crash dumps: bounded memory, an error of one line, and nothing in them is executed."""

import bz2
import gzip
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hostile_frames import PICKLE
from scheduler_driver import Driver
from tiers import thinned
from traced_runs import encoded

from quire.launch.cli import main
from quire.protocol.errors import ConfigError
from quire.replay.recorded import reader as reader_module
from quire.replay.recorded.exact import replay_lines
from quire.replay.recorded.reader import TraceReader, is_trace
from quire.scheduler_proc.trace.dump import Dump, write_dump

MIB = 2**20


def raw_lines() -> list[bytes]:
    driver = Driver(async_scheduling=True)
    for index in range(3):
        driver.add(f"r{index}", [index, 1, 2, 3, 4], max_tokens=9)
    driver.run()
    return encoded(driver.lines())


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    return path


def refused(path: Path) -> str:
    """Check that the file is refused with one line that names it; return the message."""
    with pytest.raises(ConfigError) as caught:
        replay_lines(TraceReader(path))
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and len(text) < 1000
    return text


def peak_of(action: Callable[[], Any]) -> int:
    """Return the peak of Python's memory in bytes during ``action``."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- compressed to a thousandth


def _zstd_bomb(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(content)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lambda content: lzma.compress(content, preset=0),
    "zst": _zstd_bomb,
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_endless_line_is_not_read_completely(
    tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 MiB in one line, compressed to a few KiB, with a lowered limit."""
    monkeypatch.setattr(reader_module, "LONGEST_LINE", MIB // 2)
    header = raw_lines()[0]
    path = written(tmp_path, pack(header + b"\n" + b" " * (12 * MIB)))
    assert path.stat().st_size < 60_000
    assert peak_of(lambda: refused(path)) < 11 * MIB
    assert "2: the line is longer than 524288 bytes" in refused(path)
    lenient = TraceReader(path, lenient=True)
    assert len(list(lenient)) == 2 and lenient.num_left_out == 1


@pytest.mark.parametrize("pack", thinned(PACKERS.values(), keep=1), ids=PACKERS)
def test_endless_header(tmp_path: Path, pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_LONGEST_HEADER", MIB // 2)
    path = written(tmp_path, pack(b"{" + b" " * (12 * MIB)))
    assert peak_of(lambda: refused(path)) < 11 * MIB
    assert not is_trace(path)


def test_too_large_decompression_window(tmp_path: Path) -> None:
    """The head of the compressed data names the window, which the decompressor allocates at once."""
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    path = written(tmp_path, zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"x" * MIB))
    assert str(path) in refused(path)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 29}]
    far = lzma.compress(b"{}\n", filters=filters)
    assert "compressed data is damaged" in refused(written(tmp_path, far))


def test_many_empty_frames(tmp_path: Path) -> None:
    for empty in (gzip.compress(b""), lzma.compress(b""), zstandard.compress(b"")):
        assert "is empty" in refused(written(tmp_path, empty * 2000))


# ---- other files

FILES: dict[str, bytes] = {
    "nothing": b"",
    "an empty line": b"\n",
    "pickle": PICKLE,
    "pickle behind a header": b"\x1f\x8b" + PICKLE,
    "yaml": b"!!python/object/apply:os.system ['id']\n",
    "python": b"import os; os.system('id')\n",
    "bzip2": bz2.compress(b"{}"),
    "a list": b"[]\n",
    "a number": b"7\n",
    "null": b"null\n",
    "another format": b'{"kind":"header","format":"evil","version":1}\n',
    "another version": b'{"kind":"header","format":"quire-trace","version":99}\n',
    "a version without end": b'{"kind":"header","format":"quire-trace","version":' + b"9" * 9000 + b"}\n",
    "a format without end": b'{"kind":"header","format":"' + b"x" * MIB + b'"}\n',
    "nested": b'{"kind":' + b"[" * 100_000 + b"\n",
    "invalid UTF-8": b'{"kind":"\xff\xfe"}\n',
    "NUL": bytes(5000),
    "half a gzip": gzip.compress(b"{}" * 5000)[:30],
    "half an xz": lzma.compress(b"{}" * 5000)[:40],
    "half a zstd": zstandard.compress(os.urandom(5000))[:2000],
    "an xz of garbage": b"\xfd7zXZ\x00" + bytes(range(200)),
    "a zstd of garbage": b"\x28\xb5\x2f\xfd" + bytes(range(200)),
    "a gzip of garbage": b"\x1f\x8b\x08\x00" + bytes(range(200)),
}


@pytest.mark.parametrize("content", thinned(FILES.values(), keep=6), ids=FILES)
def test_file_that_is_not_a_trace(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    refused(path)
    assert not is_trace(path) or b"quire-trace" in content


@pytest.mark.parametrize("content", thinned(FILES.values(), keep=6), ids=FILES)
def test_command_reports_one_line(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(written(tmp_path, content))])
    error = capsys.readouterr().err.strip()
    assert ended.value.code not in (0, None) and "Traceback" not in error and error.count("\n") < 3


# ---- wrong values

LIES: list[tuple[str, Any]] = [
    *(("num_blocks", 2**40), ("num_blocks", 2**63), ("num_blocks", -1), ("num_blocks", 0), ("num_blocks", 1)),
    *(("hash_bytes", 2**40), ("hash_bytes", -1), ("part", 2**40), ("config", {}), ("config", None), ("layout", {})),
    ("layout", {"groups": []}),
]
CONFIG_LIES: list[tuple[str, Any]] = [
    *(("block_size", 0), ("block_size", -4), ("block_size", 2**40), ("max_num_seqs", 2**40), ("max_num_seqs", 0)),
    *(("max_num_seqs", -1), ("max_num_batched_tokens", -1), ("max_model_len", 2**62), ("max_model_len", 0)),
    *(("num_speculative_tokens", 2**40), ("watermark", -5.0), ("scheduling_policy", "evil")),
    *(("prefix_caching_hash_algo", "evil"), ("tensor_parallel_size", 2**40)),
]


@pytest.mark.parametrize(
    ("field", "value"), thinned(LIES + [(f"config.{name}", value) for name, value in CONFIG_LIES], keep=6)
)
def test_invalid_header(tmp_path: Path, field: str, value: Any) -> None:
    """The header is refused or has no effect. Memory depends on the size of the file, not on numbers in it."""
    header, *rest = raw_lines()
    fields = msgspec.json.decode(header)
    fields.pop("crc", None)
    place, _, name = field.rpartition(".")
    (fields[place] if place else fields)[name] = value
    path = written(tmp_path, b"\n".join([msgspec.json.encode(fields), *rest]) + b"\n")

    def read() -> None:
        try:
            list(TraceReader(path, lenient=True))
            replay_lines(TraceReader(path, lenient=True))
        except ConfigError as error:
            assert "\n" not in str(error) and path.name in str(error)

    assert peak_of(read) < 64 * MIB


HEADERS: list[tuple[str, Any]] = [
    *(("config.block_size", value) for value in (0, -1, 10**9)),
    *(("kv_layout.groups.0.block_size", value) for value in (0, -1, 10**12)),
    *((name, 10**12) for name in ("num_blocks", "config.max_num_seqs", "config.max_num_batched_tokens")),
    *(("num_blocks", 10**9), ("hash_bytes", -1), ("hash_bytes", 10**12), ("now", -1e308)),
]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("settings", [[], ["--set", "block_size=16"]], ids=["exact", "what if"])
def test_command_reports_a_damaged_header_in_one_line(
    tmp_path: Path, settings: list[str], checksum: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the checksum that it had before the damage, and without one."""
    header, *rest = raw_lines()
    for field, value in HEADERS:
        fields = msgspec.json.decode(header)
        if not checksum:
            fields.pop("crc")
        *places, name = field.split(".")
        at = fields
        for place in places:
            at = at[int(place)] if place.isdigit() else at[place]
        at[name] = value
        path = written(tmp_path, b"\n".join([msgspec.json.encode(fields), *rest]) + b"\n")
        if name == "max_num_batched_tokens" and not checksum and not settings:
            continue  # this number has no effect on an exact replay
        with pytest.raises(SystemExit) as ended:
            main(["replay", str(path), *settings])
        error = capsys.readouterr().err
        assert ended.value.code == 78 and error.startswith("quire: error: ") and error.count("\n") == 1, (field, value)


@pytest.mark.parametrize("seed", thinned(range(3), keep=1))
def test_random_damage_to_lines(tmp_path: Path, seed: int) -> None:
    rng, raw = random.Random(seed), raw_lines()
    for _ in range(30):
        data = bytearray(b"\n".join(raw) + b"\n")
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    data[at : at + 1] = rng.choice((b"9" * 30, b"-", b"null", b'"', b"[" * 50, b"\xff", b"\n", b"e9"))
                case 2:
                    del data[at : at + rng.randint(1, 99)]
                case _:
                    data[at:at] = data[max(0, at - 80) : at]
        path = written(tmp_path, bytes(data))
        for lenient in (False, True):
            try:
                list(TraceReader(path, lenient=lenient))
            except ConfigError as error:
                assert "\n" not in str(error)


# ---- writing


def test_dump_does_not_follow_links(tmp_path: Path) -> None:
    """The name of a dump is predictable: in a shared folder, another user could plant a link."""
    driver = Driver()
    driver.add("a", [1, 2, 3], max_tokens=3)
    driver.run()
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / f"quire-dump-{os.getpid()}-1.jsonl").symlink_to(precious)
    dump = Dump(driver.header, list(driver.log), True, 0.0, "why")
    paths = [write_dump(tmp_path, 1, dump) for _ in range(3)]
    assert precious.read_text() == "keep" and len(set(paths)) == 3, "older dumps are not overwritten"
    for path in paths:
        assert path is not None and path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink()
        assert replay_lines(TraceReader(path)) is None
