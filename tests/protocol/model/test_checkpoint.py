"""Reading of safetensors headers: full names, sizes, and supported dtypes."""

import json
import struct
from pathlib import Path

import pytest

from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import full_name, stored_tensors
from quire.protocol.model.checksums import verify_checksums


def write(folder: Path, tensors: dict[str, tuple[str, list[int], int]], name: str = "model.safetensors") -> Path:
    """Write a file of zeros from name → (dtype, shape, bytes)."""
    header, at = {}, 0
    for key, (dtype, shape, size) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(at))
    return folder / name


@pytest.mark.parametrize(
    ("stored", "full"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("transformer.h.1.attn.attention.out_proj.bias", "model.layers.1.self_attn.o_proj.bias"),
        (
            "layers.0.block_sparse_moe.experts.3.w2.weight_packed",
            "model.layers.0.mlp.experts.3.down_proj.weight_packed",
        ),
        ("vision_tower.probe", "model.vision_tower.probe"),
    ],
)
def test_full_names(stored: str, full: str) -> None:
    assert full_name(stored) == full


def test_dtypes_of_packed_weights_are_accepted(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    write(tmp_path, {name: ("U8", [2, 3, 16], 96)})
    assert stored_tensors(tmp_path)[name].num_bytes == 96
    write(tmp_path, {"model.norm.weight": ("BOOL", [4], 4)})
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight has dtype BOOL; supported"):
        stored_tensors(tmp_path)
    write(tmp_path, {name: ("U8", [2, 3, 16], 95)})
    with pytest.raises(ConfigError, match="invalid shape, data type, or offset"):
        stored_tensors(tmp_path)


def test_tensor_stored_under_two_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"model.norm.weight": ("F32", [1], 4), "model.language_model.norm.weight": ("F32", [1], 4)})
    with pytest.raises(ConfigError, match="is also in"):
        stored_tensors(tmp_path)


def test_only_listed_files_are_compared(tmp_path: Path) -> None:
    file, other = write(tmp_path, {"a": ("F32", [1], 4)}), write(tmp_path, {"a": ("F32", [1], 4)}, "b.safetensors")
    assert verify_checksums(tmp_path, [file, other]) == 0
    (tmp_path / "SHA256SUMS").write_text(f"\n{'0' * 64}  ./b.safetensors\n")
    assert verify_checksums(tmp_path, [file, tmp_path / "absent"]) == 0
    with pytest.raises(ConfigError, match=r"b\.safetensors: SHA-256 differs from SHA256SUMS"):
        verify_checksums(tmp_path, [file, other])
