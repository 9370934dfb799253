"""Forms of the same weights in checkpoints: fused tensors, separate or merged experts; and parts of ranks."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiers import thinned

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import load_weights

Factory = Callable[..., tuple[Path, Any]]
Tensors = dict[str, torch.Tensor]

SINGLE = "model.safetensors"


class Rank:
    """``TensorParallel`` with a rank and size, without communication."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is computed")

    all_gather = all_reduce


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def copy_of(checkpoint_factory: Factory, tmp_path: Path) -> Callable[..., Path]:
    def copy(family: str, **overrides: Any) -> Path:
        return shutil.copytree(checkpoint_factory(family, **overrides)[0], tmp_path / family)

    return copy


def _load(folder: Path, rank: Rank | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_model(load_model_config(folder), dtype, "cpu", parallel=rank)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load_weights(model, folder, dtype, progress=False)
    assert all(not bool(p.isnan().any()) for p in model.parameters())
    return model


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)


def _assert_equal(a: Decoder, b: Decoder) -> None:
    others = b.weight_slots()
    for name, slot in a.weight_slots().items():
        assert torch.equal(slot.target, others[name].target), name


def _refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def _merge_experts(tensors: Tensors, gate: str, up: str, down: str, into: str) -> None:
    """Merge experts into one tensor, as transformers 5 stores them."""
    layers = {match[1] for name in tensors if (match := re.match(r"(.*\.experts)\.0\.", name))}
    for base in layers:
        count = sum(name.startswith(base) and name.endswith(f"{down}.weight") for name in tensors)
        parts = {
            part: torch.stack([tensors.pop(f"{base}.{i}.{part}.weight") for i in range(count)])
            for part in (gate, up, down)
        }
        name = base.replace("block_sparse_moe", into)
        tensors[f"{name}.gate_up_proj"] = torch.cat((parts[gate], parts[up]), 1)
        tensors[f"{name}.down_proj"] = parts[down]


def _merge_mixtral(tensors: Tensors) -> None:
    _merge_experts(tensors, "w1", "w3", "w2", into="mlp")
    for name in [name for name in tensors if "block_sparse_moe" in name]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)


def _merge_qwen(tensors: Tensors) -> None:
    _merge_experts(tensors, "gate_proj", "up_proj", "down_proj", into="")


def _fuse(tensors: Tensors, base: str, parts: list[str], fused: str) -> None:
    for layer in (0, 1):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{layer}.{base}.{part}.{kind}" for part in parts]
            if names[0] in tensors:
                tensors[f"model.layers.{layer}.{base}.{fused}.{kind}"] = torch.cat([tensors.pop(n) for n in names])


def _fuse_all(tensors: Tensors) -> None:
    _fuse(tensors, "self_attn", ["q_proj", "k_proj", "v_proj"], "qkv_proj")
    _fuse(tensors, "mlp", ["gate_proj", "up_proj"], "gate_up_proj")


@pytest.mark.parametrize(
    ("family", "overrides", "change"),
    [
        ("llama", {}, _fuse_all),
        ("llama", {"attention_bias": True, "mlp_bias": True}, _fuse_all),
        ("mixtral", {}, _merge_mixtral),
        ("qwen3_moe", {}, _merge_qwen),
    ],
)
@pytest.mark.parametrize("size", thinned([1, 2], keep=1))
def test_splits_fused_tensors(
    family: str, overrides: dict[str, Any], change: Callable[[Tensors], None], size: int, copy_of: Any
) -> None:
    folder = copy_of(family, **overrides)
    apart = [_load(folder, Rank(rank, size)) for rank in range(size)]
    _edit(folder, change)
    assert any("gate_up_proj" in name for name in load_file(folder / SINGLE))
    for rank, model in enumerate(apart):
        _assert_equal(_load(folder, Rank(rank, size)), model)


def test_text_model_with_the_names_of_transformers_5(copy_of: Any) -> None:
    folder = copy_of("gemma3_vision")
    model = _load(folder)
    assert any(name.startswith("language_model.model.") for name in load_file(folder / SINGLE))

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            new = name.replace("language_model.model.", "model.language_model.")
            tensors[new if new != name else f"model.{name}"] = tensors.pop(name)

    _edit(folder, rename)
    _assert_equal(_load(folder), model)


def test_rejects_vision_tower_in_a_text_architecture(copy_of: Any) -> None:
    folder = copy_of("gemma3")
    _edit(folder, lambda t: t.update({"vision_tower.post_layernorm.bias": torch.ones(1)}))
    assert "vision_tower.post_layernorm.bias is not part of the model" in _refused(folder)


@pytest.mark.parametrize("family", thinned(["qwen2", "phi3", "gemma2", "olmo2", "mixtral", "gpt_oss"], keep=2))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_hold_all_weights(family: str, size: int, copy_of: Any) -> None:
    folder = copy_of(family)
    whole = _load(folder).weight_slots()
    for rank in range(size):
        slots = _load(folder, Rank(rank, size)).weight_slots()
        assert slots.keys() == whole.keys()
        for name, slot in slots.items():
            full = whole[name].target
            expected = full[slot.part] if slot.part else full
            if slot.target.numel() or rank == 0:
                assert torch.equal(slot.target, expected), name
    assert sum(1 for slot in whole.values() if not slot.target.numel()) == 0


def _covered(folder: Path, size: int) -> dict[str, torch.Tensor]:
    """Count on how many ranks each number of each tensor is."""
    counts: dict[str, torch.Tensor] = {}
    for rank in range(size):
        for name, slot in _load(folder, Rank(rank, size)).weight_slots().items():
            counts.setdefault(name, torch.zeros(slot.shape))[slot.part] += 1
    return counts


def test_each_weight_is_on_one_rank_except_norms_and_routers(copy_of: Any) -> None:
    for name, count in _covered(copy_of("gpt_oss"), 2).items():
        copies = 2 if name.endswith(("norm.weight", "mlp.gate.weight", "mlp.gate.bias")) else 1
        assert bool((count == copies).all()), name


def test_kv_heads_are_on_every_rank_whose_queries_read_them(copy_of: Any) -> None:
    counts = _covered(copy_of("llama"), 4)
    assert bool((counts["model.layers.0.self_attn.k_proj.weight"] == 2).all())
    assert bool((counts["model.layers.0.self_attn.q_proj.weight"] == 1).all())


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llama", 3, "tensor_parallel_size 3 does not divide the model's 4 heads and 2 KV heads"),
        ("llama", 8, "tensor_parallel_size 8 does not divide"),
        ("qwen3_moe", 5, "tensor_parallel_size 5 does not divide"),
    ],
)
def test_sizes_that_do_not_divide(family: str, size: int, message: str, checkpoint_factory: Factory) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(load_model_config(checkpoint_factory(family)[0]), torch.float32, "meta", parallel=Rank(0, size))


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"intermediate_size": 45}, "does not divide the model's intermediate_size 45"),
        ("qwen3_moe", {"moe_intermediate_size": 7}, "does not divide the model's expert width 7"),
    ],
)
def test_widths_that_do_not_divide(
    family: str, overrides: dict[str, Any], message: str, checkpoint_factory: Factory
) -> None:
    with pytest.raises(ConfigError, match=message):
        config = load_model_config(checkpoint_factory(family, **overrides)[0])
        build_model(config, torch.float32, "meta", parallel=Rank(0, 2))


class TestExperts:
    def test_missing_expert(self, copy_of: Any) -> None:
        folder = copy_of("qwen3_moe")
        _edit(folder, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
        assert "tensor model.layers.1.mlp.experts.3.up_proj.weight is missing" in _refused(folder)

    def test_both_forms_at_once(self, copy_of: Any) -> None:
        folder = copy_of("mixtral")
        one = "model.layers.0.block_sparse_moe.experts.2.w2.weight"

        def merge_and_keep(tensors: Tensors) -> None:
            kept = tensors[one].clone()
            _merge_mixtral(tensors)
            tensors[one] = kept

        _edit(folder, merge_and_keep)
        assert "fill the weight slot" in _refused(folder)

    def test_wrong_number(self, copy_of: Any) -> None:
        folder = copy_of("mixtral")
        _edit(folder, _merge_mixtral)
        name = "model.layers.1.mlp.experts.down_proj"
        _edit(folder, lambda t: t.update({name: t[name][:3]}))
        assert f"tensor {name} has shape [3, 32, 48], but config.json requires [4, 32, 48]" in _refused(folder)

    def test_a_dense_model_has_none(self, copy_of: Any) -> None:
        folder = copy_of("llama")
        _edit(folder, lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(4, 32, 48)}))
        assert "experts.down_proj is not part of the model" in _refused(folder)


class TestChecksums:
    def _sum(self, file: Path) -> str:
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def _damage(self, folder: Path) -> None:
        data = bytearray((folder / SINGLE).read_bytes())
        data[-1] ^= 1
        (folder / SINGLE).write_bytes(bytes(data))

    @pytest.mark.parametrize("form", ["sums", "json", "json with a prefix"])
    def test_error_names_the_damaged_file(self, form: str, copy_of: Any) -> None:
        folder = copy_of("llama")
        good = {name: self._sum(folder / name) for name in (SINGLE, "config.json")}
        if form == "sums":
            text = "".join(f"{value} *{name}\n" for name, value in good.items()) + f"{'0' * 64}  elsewhere.bin\n"
            (folder / "SHA256SUMS").write_text(text)
        else:
            prefix = "sha256:" if "prefix" in form else ""
            (folder / "checksums.json").write_text(json.dumps({name: prefix + v for name, v in good.items()}))
        _load(folder)
        self._damage(folder)
        message = _refused(folder)
        assert f"{SINGLE}: SHA-256 differs from" in message
        _load(folder, Rank(1, 2))  # only rank 0 checks the files

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("SHA256SUMS", "hello\n", "line 1 must be a SHA-256"),
            ("checksums.json", "[]", "must hold a JSON object"),
            ("checksums.json", '{"model.safetensors": 5}', "value of 'model.safetensors' must be a SHA-256 in hex"),
        ],
    )
    def test_invalid_checksum_list(self, name: str, text: str, message: str, copy_of: Any) -> None:
        folder = copy_of("llama")
        (folder / name).write_text(text)
        assert message in _refused(folder)
