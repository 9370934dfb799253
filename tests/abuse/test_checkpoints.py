"""Malicious or damaged checkpoints: the error is one line that names the file, and no code of a checkpoint is run.

Wrong headers or configurations are refused before any process starts. A weight that is not finite is found by the
process that loads it.
"""

import json
import math
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_checkpoints import (
    CONFIG,
    INDEX,
    MUTATIONS,
    SINGLE,
    TINY,
    VOCAB,
    open_checkpoint,
    packed,
    split,
    write,
)
from tiers import thinned

from quire.launch.cli import main
from quire.protocol.errors import ConfigError
from quire.protocol.process.child import EX_CONFIG

NORM, Q_PROJ, EMBED = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder)
    text = str(caught.value)
    assert str(folder) in text and text.isprintable() and len(text) < 700
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write(tmp_path / "shards", sharded=True)


def test_undamaged_checkpoints_open(folder: Path, shards: Path) -> None:
    open_checkpoint(folder)
    open_checkpoint(shards)


# ---- headers


def edit(folder: Path, change: Callable[[dict[str, Any]], object], file: str = SINGLE) -> None:
    header, data = split(folder / file)
    change(header)
    (folder / file).write_bytes(packed(header, data))


def moved(header: dict[str, Any], name: str, by: int) -> None:
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin + by, end + by]


INVALID_HEADER = "is truncated, damaged or not a safetensors file"
"""The beginning of the error; the message of the library follows."""

HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "overlapping tensors": (lambda h: moved(h, NORM, -8), INVALID_HEADER),
    "tensors in one place": (
        lambda h: h[Q_PROJ].update(data_offsets=h["model.layers.1.self_attn.q_proj.weight"]["data_offsets"]),
        INVALID_HEADER,
    ),
    "a gap": (lambda h: moved(h, "lm_head.weight", 8), "invalid offset for tensor `lm_head.weight`"),
    "a gap in front": (lambda h: h.pop(EMBED), f"invalid offset for tensor `{Q_PROJ}`"),
    "a tensor less": (lambda h: h.pop("lm_head.weight"), INVALID_HEADER),
    "beyond the end": (lambda h: moved(h, "lm_head.weight", 2**40), "invalid offset for tensor `lm_head.weight`"),
    "an offset of 2**63": (lambda h: h[NORM].update(data_offsets=[0, 2**63]), f"invalid offset for tensor `{NORM}`"),
    "a negative offset": (lambda h: h[NORM].update(data_offsets=[-32, 0]), INVALID_HEADER),
    "offsets the wrong way round": (lambda h: h[NORM]["data_offsets"].reverse(), f"invalid offset for tensor `{NORM}`"),
    "three offsets": (lambda h: h[NORM]["data_offsets"].append(0), INVALID_HEADER),
    "offsets in floats": (lambda h: h[NORM].update(data_offsets=[0.0, 32.0]), INVALID_HEADER),
    "no offsets": (lambda h: h[NORM].pop("data_offsets"), INVALID_HEADER),
    "a smaller dtype than the data": (lambda h: h[NORM].update(dtype="F16"), INVALID_HEADER),
    "a larger dtype than the data": (lambda h: h[NORM].update(dtype="F64"), INVALID_HEADER),
    "a dtype of integers": (lambda h: h[NORM].update(dtype="I32"), "has dtype I32"),
    "an unknown dtype": (lambda h: h[NORM].update(dtype="F33"), INVALID_HEADER),
    "a dtype that is text": (lambda h: h[NORM].update(dtype="x\n\x1b[2J" * 99), INVALID_HEADER),
    "a dtype of null": (lambda h: h[NORM].update(dtype=None), INVALID_HEADER),
    "a shape larger than the data": (lambda h: h[NORM].update(shape=[9]), INVALID_HEADER),
    "a shape of the same size": (lambda h: h[Q_PROJ].update(shape=[4, 16]), "but config.json requires [8, 8]"),
    "a transposed shape": (lambda h: h[EMBED].update(shape=[8, VOCAB]), "but config.json requires [24, 8]"),
    "a flat shape": (lambda h: h[Q_PROJ].update(shape=[64]), "but config.json requires [8, 8]"),
    "a negative shape": (lambda h: h[Q_PROJ].update(shape=[-8, -8]), INVALID_HEADER),
    "a huge shape": (lambda h: h[NORM].update(shape=[2**62, 4]), INVALID_HEADER),
    "a shape that is one when wrapped": (lambda h: h[NORM].update(shape=[2**32, 2**32, 8]), INVALID_HEADER),
    "a shape of many dimensions": (lambda h: h[NORM].update(shape=[8] + [1] * 5000), "5001 dimensions"),
    "a shape in floats": (lambda h: h[NORM].update(shape=[8.0]), INVALID_HEADER),
    "a shape of booleans": (lambda h: h[NORM].update(shape=[True, 8]), INVALID_HEADER),
    "an entry that is a number": (lambda h: h.update({NORM: 7}), INVALID_HEADER),
    "another name": (lambda h: h.update({"model.norm.weights": h.pop(NORM)}), "model.norm.weight"),
    "a name with control characters": (lambda h: h.update({"a\x1b[2J\n": h.pop(NORM)}), "invalid name"),
    "a huge name": (lambda h: h.update({"a" * 10_000: h.pop(NORM)}), "invalid name"),
    "a layer too many": (
        lambda h: h.update({Q_PROJ.replace(".0.", ".7."): h.pop(Q_PROJ)}),
        "has tensors of 3 layers; config.json requires 2",
    ),
    "metadata that is a list": (lambda h: h.update(__metadata__=[1]), INVALID_HEADER),
    "metadata of numbers": (lambda h: h.update(__metadata__={"a": 1}), INVALID_HEADER),
}


@pytest.mark.parametrize(("change", "message"), thinned(HEADERS.values(), keep=10), ids=HEADERS)
def test_invalid_header(folder: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(folder, change)
    assert message in refused(folder)


RAW: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", INVALID_HEADER),
    "seven bytes": (b"\x02" + bytes(6), INVALID_HEADER),
    "a header of 0 bytes": (bytes(8), INVALID_HEADER),
    "a header of 2**63 bytes": (struct.pack("<Q", 2**63) + b"{}", INVALID_HEADER),
    "a header of all bytes": (b"\xff" * 8 + b"{}", INVALID_HEADER),
    "a header of 100 MB that is not there": (struct.pack("<Q", 10**8) + b"{}", INVALID_HEADER),
    "an empty header": (packed({}, b""), "layers"),
    "a list": (packed([], b""), INVALID_HEADER),
    "invalid JSON": (packed(b"\x80\x04\x95pickle", b""), INVALID_HEADER),
    "invalid UTF-8": (packed(b'{"\xff\xfe": 1}', b""), INVALID_HEADER),
    "deeply nested": (packed(b'{"a":' * 50_000, b""), INVALID_HEADER),
    "a huge number": (packed(b'{"a": ' + b"9" * 50_000 + b"}", b""), INVALID_HEADER),
    "NaN": (packed(b'{"a": NaN}', b""), INVALID_HEADER),
    "a name twice": (packed(b'{"a": {"dtype": "F32", "dtype": "F16"}}', b""), INVALID_HEADER),
    "a zip, as torch makes them": (b"PK\x03\x04" + bytes(100), INVALID_HEADER),
    "two documents": (packed(b"{}{}", b""), INVALID_HEADER),
}


@pytest.mark.parametrize(("content", "message"), thinned(RAW.values(), keep=4), ids=RAW)
def test_file_that_is_not_safetensors(folder: Path, content: bytes, message: str) -> None:
    (folder / SINGLE).write_bytes(content)
    assert message in refused(folder)


def test_a_header_of_more_than_100_mb_is_not_read(folder: Path) -> None:
    with (folder / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", 10**8 + 1) + b"{")
        file.truncate(9 + 10**8)
    assert "header too large" in refused(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", thinned([EMBED, NORM, Q_PROJ, "model.layers.1.mlp.down_proj.weight", "lm_head.weight"], keep=1)
)
def test_weight_that_is_not_finite(folder: Path, name: str, value: float) -> None:
    header, data = split(folder / SINGLE)
    at = header[name]["data_offsets"][1] - 4
    (folder / SINGLE).write_bytes(packed(header, data[:at] + struct.pack("<f", value) + data[at + 4 :]))
    assert f"{SINGLE}: tensor {name} has non-finite values" in refused(folder)


def test_large_finite_weights_are_accepted(folder: Path) -> None:
    """Each of them is finite, but their sum is not."""
    header, data = split(folder / SINGLE)
    begin, end = header[EMBED]["data_offsets"]
    huge = struct.pack("<f", 3e38) * ((end - begin) // 4)
    (folder / SINGLE).write_bytes(packed(header, data[:begin] + huge + data[end:]))
    open_checkpoint(folder)


# ---- several files

INDEXES: dict[str, tuple[Any, str]] = {
    "a missing shard": ({"weight_map": {EMBED: "c.safetensors"}}, "shard is missing"),
    "the folder above": ({"weight_map": {EMBED: "../a.safetensors"}}, "is not the name of a safetensors file"),
    "a file of the machine": ({"weight_map": {EMBED: "/etc/passwd"}}, "is not the name of a safetensors file"),
    "a file of another kind": ({"weight_map": {EMBED: "config.json"}}, "is not the name of a safetensors file"),
    "a pickle": ({"weight_map": {EMBED: "pytorch_model.bin"}}, "is not the name of a safetensors file"),
    "two dots": ({"weight_map": {EMBED: ".."}}, "is not the name of a safetensors file"),
    "a NUL": ({"weight_map": {EMBED: "a\x00.safetensors"}}, "is not the name of a safetensors file"),
    "control characters": ({"weight_map": {EMBED: "\x1b[2J\n.safetensors"}}, "is not the name of a safetensors file"),
    "a huge file name": ({"weight_map": {EMBED: "a" * 5000 + ".safetensors"}}, "is not the name of"),
    "no name": ({"weight_map": {EMBED: ""}}, "is not the name of a safetensors file"),
    "a number for a name": ({"weight_map": {EMBED: 7}}, "no readable weight_map"),
    "an address": ({"weight_map": {EMBED: "http://host/a.safetensors"}}, "is not the name of a safetensors file"),
    "a list": ([], "must hold a JSON object"),
    "a list for a map": ({"weight_map": []}, "no readable weight_map"),
    "nothing": ({}, "no readable weight_map"),
    "an empty map": ({"weight_map": {}}, "no readable weight_map"),
    "a tensor of another shard": ({"weight_map": {"lm_head.weight": "a.safetensors"}}, "places it there"),
    "a tensor with control characters": ({"weight_map": {"\x1b\n": "a.safetensors"}}, "is missing"),
    "half of the shards": ({"weight_map": {EMBED: "a.safetensors"}}, "layers"),
}


@pytest.mark.parametrize(("index", "message"), thinned(INDEXES.values(), keep=5), ids=INDEXES)
def test_invalid_index(shards: Path, index: Any, message: str) -> None:
    (shards / INDEX).write_text(json.dumps(index))
    assert message in refused(shards)


def test_missing_truncated_or_duplicate_shard(shards: Path) -> None:
    whole = (shards / "b.safetensors").read_bytes()
    (shards / "b.safetensors").write_bytes(whole[:-1])
    assert "b.safetensors: is truncated" in refused(shards)
    shutil.copy(shards / "a.safetensors", shards / "b.safetensors")
    assert "b.safetensors: tensor " in refused(shards)
    (shards / "b.safetensors").unlink()
    assert "b.safetensors: shard is missing" in refused(shards)
    (shards / "b.safetensors").mkdir()
    assert "b.safetensors: shard is missing" in refused(shards)


# ---- links


@pytest.mark.parametrize(
    "name", [SINGLE, CONFIG, "tokenizer.json", "generation_config.json", "chat_template.jinja", "x.json"]
)
def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    target = outside / name
    outside.mkdir()
    if (folder / name).exists():
        (folder / name).rename(target)
    else:
        target.write_text("{}")
    (folder / name).symlink_to(target)
    assert f"{name}: symbolic link to a file outside" in refused(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(f"../outside/{name}")
    assert f"{name}: symbolic link to a file outside" in refused(folder)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "/dev/zero", "/proc/self/mem", "nothing.json", "config.json", "..", "."]
)
def test_links_to_system_files(folder: Path, target: str) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(target)
    assert CONFIG in refused(folder) or "config.json not found" in refused(folder)


def test_links_within_the_folder_and_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).rename(folder / "weights")
    (folder / SINGLE).symlink_to("weights")
    open_checkpoint(folder)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    write(snapshot)
    blobs.mkdir()
    for name in (SINGLE, CONFIG):
        (snapshot / name).rename(blobs / f"{name}-sum")
        (snapshot / name).symlink_to(f"../../blobs/{name}-sum")
    open_checkpoint(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    open_checkpoint(tmp_path / "link")


# ---- code and pickles


class Trap:
    """A pickle and a source file that would create a file if loaded or imported."""

    def __init__(self, place: Path) -> None:
        self.file = place / "sprung"
        self.source = f"open({str(self.file)!r}, 'w')\n"
        touch = f"cbuiltins\nopen\n(V{self.file}\nVw\ntR.".encode()
        self.pickle = touch


def test_the_code_of_a_checkpoint_is_never_run(folder: Path, tmp_path: Path) -> None:
    """A checkpoint of a supported architecture is opened: many of those contain code too."""
    trap = Trap(tmp_path)
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "tokenization_evil.py", "setup.py"):
        (folder / name).write_text(trap.source)
    auto_map = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    (folder / CONFIG).write_text(json.dumps(TINY | {"auto_map": auto_map, "trust_remote_code": True}))
    open_checkpoint(folder)
    (folder / CONFIG).write_text(json.dumps(TINY | {"auto_map": auto_map, "architectures": ["EvilForCausalLM"]}))
    assert "code named by auto_map is never run" in refused(folder)
    assert not trap.file.exists()


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl", "pickle"])
def test_pickled_weights_are_never_opened(folder: Path, tmp_path: Path, suffix: str) -> None:
    trap = Trap(tmp_path)
    (folder / SINGLE).unlink()
    (folder / f"pytorch_model.{suffix}").write_bytes(trap.pickle)
    assert "has only pickled weights" in refused(folder)
    (folder / SINGLE).write_bytes(trap.pickle)
    assert SINGLE in refused(folder)
    assert not trap.file.exists()


# ---- config.json

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [1.0] * 2}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads of 2**31": ({"num_attention_heads": 2**31}, "num_attention_heads"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads"),
    "heads that do not divide": ({"num_attention_heads": 3}, "num_attention_heads"),
    "more KV heads": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "negative KV heads": ({"num_key_value_heads": -1}, "num_key_value_heads"),
    "a vocabulary of 2**31": ({"vocab_size": 2**31}, "vocab_size"),
    "a negative vocabulary": ({"vocab_size": -1}, "vocab_size"),
    "another vocabulary": ({"vocab_size": VOCAB + 1}, "but config.json requires [25, 8]"),
    "a smaller vocabulary": ({"vocab_size": VOCAB - 1}, "but config.json requires [23, 8]"),
    "a vocabulary in words": ({"vocab_size": "24"}, "vocab_size"),
    "a vocabulary that is true": ({"vocab_size": True}, "vocab_size"),
    "a vocabulary that is NaN": ({"vocab_size": math.nan}, "vocab_size"),
    "a vocabulary in a float": ({"vocab_size": 24.0}, "vocab_size"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "too many layers": ({"num_hidden_layers": 2**31}, "num_hidden_layers"),
    "more layers than weights": ({"num_hidden_layers": 4096}, "has tensors of 2 layers"),
    "fewer layers than weights": ({"num_hidden_layers": 1}, "has tensors of 2 layers"),
    "a width of 2**31": ({"hidden_size": 2**31}, "hidden_size"),
    "another width": ({"hidden_size": 16}, "but config.json requires [24, 16]"),
    "an odd head": ({"head_dim": 3}, "head_dim"),
    "a huge head": ({"head_dim": 2**31}, "head_dim"),
    "another inner width": ({"intermediate_size": 13}, "shape"),
    "a huge inner width": ({"intermediate_size": 2**20}, "shape"),
    "positions of 2**31": ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
    "negative positions": ({"max_position_embeddings": -1}, "max_position_embeddings"),
    "an epsilon of 0": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "an epsilon that is NaN": ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    "an epsilon in words": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    "an infinite theta": ({"rope_theta": math.inf}, "rope_theta"),
    "a negative theta": ({"rope_theta": -1.0}, "rope_theta"),
    "an unknown rope": ({"rope_scaling": {"rope_type": "evil"}}, "rope type 'evil'"),
    "a rope of a list": ({"rope_scaling": [1]}, "rope_scaling"),
    "a rope factor that is NaN": ({"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, "factor"),
    "a longrope from one position": (
        {"rope_scaling": {**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 1}},
        "original_max_position_embeddings",
    ),
    "infinite divisors": ({"rope_scaling": {**LONGROPE, "short_factor": [math.inf] * 2}}, "short_factor"),
    "an unknown activation": ({"hidden_act": "evil"}, "hidden_act"),
    "a huge activation name": ({"hidden_act": "x" * 100_000}, "hidden_act"),
    "an unknown dtype": ({"torch_dtype": "float8"}, "dtype"),
    "an end past the vocabulary": ({"eos_token_id": VOCAB}, "eos_token_id 24"),
    "an end of 2**31": ({"eos_token_id": [2, 2**31]}, "eos_token_id 2147483648"),
    "a negative end": ({"eos_token_id": -1}, "eos_token_id"),
    "an end in words": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    "an end that is true": ({"eos_token_id": True}, "eos_token_id must be a token id"),
    "an end in a float": ({"eos_token_id": [1.5]}, "eos_token_id must be a token id"),
    "an unknown architecture": ({"architectures": ["Evil\x1b[2J\nForCausalLM"]}, "is not supported"),
    "no architecture": ({"architectures": []}, "is not supported"),
    "architectures of numbers": ({"architectures": 7}, "is not supported"),
    "weights of four bits": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "tied weights that are not": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
}


@pytest.mark.parametrize(("fields", "message"), thinned(CONFIGS.values(), keep=12), ids=CONFIGS)
def test_invalid_config(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path / "model", **fields))


CONFIG_TEXTS = [
    b"", b"[]", b"7", b"null", b'"x"', b"{", b"{}}", b"\xff\xfe{}", b"\x00", b'{"a":' * 30_000, b"[" * 30_000,
    b'{"vocab_size": ' + b"9" * 10_000 + b"}", b"\x80\x04\x95pickle", b"--- !!python/object/apply:os.system [id]",
    b"{'a': 1}", b'{"a": 1,}', b'{"a" 1}', b"{}", b'{"architectures": null}', b'{"architectures": [["x"]]}',
]  # fmt: skip


@pytest.mark.parametrize("text", thinned(CONFIG_TEXTS, keep=3), ids=range(len(CONFIG_TEXTS)))
def test_config_that_is_not_a_json_object(folder: Path, text: bytes) -> None:
    (folder / CONFIG).write_bytes(text)
    assert CONFIG in refused(folder)


# ---- quire serve


@pytest.mark.parametrize(
    "kind", thinned(["header", "vocabulary", "layers", "config", "pickle", "link", "tokenizer", "end"], keep=3)
)
def test_serve_refuses_before_anything_is_started(
    folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted(*args: Any, **more: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", unwanted)
    match kind:
        case "header":
            edit(folder, lambda h: moved(h, NORM, -8))
        case "vocabulary" | "layers" | "config" | "end":
            field = {"vocabulary": "vocab_size", "layers": "num_hidden_layers", "end": "eos_token_id"}.get(
                kind, "head_dim"
            )
            (folder / CONFIG).write_text(json.dumps(TINY | {field: 25}))
        case "pickle":
            (folder / SINGLE).rename(folder / "pytorch_model.bin")
        case "link":
            (folder / SINGLE).rename(tmp_path / SINGLE)
            (folder / SINGLE).symlink_to(tmp_path / SINGLE)
        case _:
            (folder / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", str(folder)])
    assert ended.value.code == EX_CONFIG
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and str(folder) in message and "Traceback" not in message


# ---- random damage


TIMES = {"bytes": 250, "length": 200, "header": 250, "config": 200, "config text": 80, "weights": 20}


@pytest.mark.full
@pytest.mark.parametrize("kind", thinned(MUTATIONS, keep=3))
def test_random_damage_is_refused_or_opens(tmp_path: Path, kind: str) -> None:
    """A thousand mutations. A checkpoint that opens was changed in unused bytes or to another valid value."""
    whole = write(tmp_path / "whole")
    num_refused = 0
    for seed in range(TIMES[kind]):
        folder = shutil.copytree(whole, tmp_path / "model", dirs_exist_ok=True)
        MUTATIONS[kind](folder, random.Random(f"{kind} {seed}"))
        try:
            open_checkpoint(folder)
        except ConfigError as error:
            text = str(error)
            assert str(folder) in text and text.isprintable() and len(text) < 700, seed
            num_refused += 1
    assert num_refused > TIMES[kind] // 2
