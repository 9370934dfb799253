"""Valid checkpoint folders, and invalid ones with a one-line error that names the file."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import stored_tensors
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models import linear
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import fill_model, init_dummy_weights, load_weights

Factory = Callable[..., tuple[Path, Any]]

SINGLE = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def weight_bytes(folder: Path) -> int:
    return sum(tensor.num_bytes for tensor in stored_tensors(folder).values())


@pytest.fixture
def single(checkpoint_factory: Factory, tmp_path: Path) -> Path:
    """Copy a checkpoint with one file."""
    return shutil.copytree(checkpoint_factory("llama")[0], tmp_path / "single")


@pytest.fixture
def sharded(checkpoint_factory: Factory, tmp_path: Path) -> Path:
    """Copy a checkpoint with several files and an index."""
    return shutil.copytree(checkpoint_factory("llama", max_shard_size="30KB")[0], tmp_path / "sharded")


def _model(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return build_model(load_model_config(folder), dtype, "cpu")


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = _model(folder, dtype)
    load_weights(model, folder, dtype, progress=False)
    return model


def _refused(folder: Path) -> str:
    model = _model(folder)
    with pytest.raises(ConfigError) as caught:
        load_weights(model, folder, torch.float32, progress=False)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file(tensors, folder / SINGLE)


def _assert_equal(a: Decoder, b: Decoder) -> None:
    others = b.weight_slots()
    for name, slot in a.weight_slots().items():
        assert torch.equal(slot.target, others[name].target), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_loads_every_weight(family: str, checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory(family)
    slots = _load(folder).weight_slots()
    for name, weight in reference.named_parameters():
        assert torch.equal(slots[name].target, weight.expand_as(slots[name].target)), name
    assert weight_bytes(folder) == sum(4 * weight.numel() for weight in reference.parameters())


def test_shards_give_the_same_model(single: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2 and not (sharded / SINGLE).exists()
    _assert_equal(_load(sharded), _load(single))
    assert weight_bytes(sharded) == weight_bytes(single)


def test_other_files_are_not_read(single: Path) -> None:
    for name in ("consolidated.safetensors", "pytorch_model.bin", "consolidated.00.pth"):
        (single / name).write_bytes(b"not weights")
    _load(single)


def test_names_without_the_prefix(single: Path, sharded: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    _edit(single, strip)
    _assert_equal(_load(single), _load(sharded))


def test_rotary_buffers_are_ignored(single: Path) -> None:
    _edit(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    _load(single)


def test_a_stored_head_beside_tied_embeddings(checkpoint_factory: Factory, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_factory("llama", tie_word_embeddings=True)[0], tmp_path / "tied")
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    model = _load(folder)
    assert model.lm_head is model.embed_tokens.table
    _edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    _load(folder)
    _edit(folder, lambda t: t["lm_head.weight"].mul_(2))
    assert "lm_head.weight differs from the embedding" in _refused(folder)


def test_dtypes_are_converted(checkpoint_factory: Factory) -> None:
    folder, reference = checkpoint_factory("qwen2", dtype=torch.bfloat16)
    slots = _load(folder, torch.float32).weight_slots()
    for name, weight in reference.named_parameters():
        assert torch.equal(slots[name].target, weight.float()), name
    assert all(p.dtype is torch.bfloat16 for p in _load(folder, torch.bfloat16).parameters())
    assert weight_bytes(folder) == sum(2 * weight.numel() for weight in reference.parameters())


@pytest.mark.parametrize("progress", [True, False])
def test_progress_goes_to_stderr(single: Path, progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    load_weights(_model(single), single, torch.float32, progress)
    out, err = capfd.readouterr()
    assert not out
    assert ("Loading weights" in err) is progress


def test_missing_tensor(single: Path) -> None:
    _edit(single, lambda t: t.pop(Q_PROJ))
    assert f"tensor {Q_PROJ} is missing" in _refused(single)


def test_missing_head_of_an_untied_model(single: Path) -> None:
    _edit(single, lambda t: t.pop("lm_head.weight"))
    assert "tensor lm_head.weight is missing" in _refused(single)


def test_unused_tensor(single: Path) -> None:
    _edit(single, lambda t: t.update({"model.layers.7.extra": torch.ones(1), "model.layers.8.extra": torch.ones(1)}))
    assert f"{SINGLE}: tensor model.layers.7.extra is not part of the model (and 1 more)" in _refused(single)


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_wrong_shape(single: Path, name: str) -> None:
    _edit(single, lambda t: t.update({name: t[name][:-1].clone()}))
    message = _refused(single)
    assert f"{SINGLE}: tensor {name} has shape [" in message and "config.json" in message


def test_wrong_dtype(single: Path) -> None:
    _edit(single, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int8)}))
    assert f"{SINGLE}: tensor {Q_PROJ} has dtype I8" in _refused(single)


def test_duplicate_tensor(single: Path) -> None:
    _edit(single, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    assert "norm.weight is also in model.safetensors" in _refused(single)


def test_truncated_shard_fails_before_any_tensor_is_read(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-10])
    model = _model(sharded)
    for parameter in model.parameters():
        parameter.data.fill_(5.0)
    with pytest.raises(ConfigError, match=f"{victim.name}: is truncated"):
        load_weights(model, sharded, torch.float32, progress=False)
    assert all(bool((parameter == 5.0).all()) for parameter in model.parameters())


def test_folder_with_pickled_weights_only(single: Path) -> None:
    (single / SINGLE).rename(single / "pytorch_model.bin")
    assert "only pickled weights (pytorch_model.bin)" in _refused(single)


def test_folder_without_weights(single: Path) -> None:
    (single / SINGLE).rename(single / "adapter.safetensors")
    assert "(found adapter.safetensors)" in _refused(single)
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        weight_bytes(single / "nowhere")


def test_dummy_weights_depend_on_the_seed(single: Path) -> None:
    models = [_model(single) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        init_dummy_weights(model, seed)
    _assert_equal(models[0], models[1])
    assert not torch.equal(models[0].lm_head.weight, models[2].lm_head.weight)
    weights = torch.cat([weight.view(-1) for weight in models[0].parameters() if weight.dim() > 1])
    assert abs(float(weights.std()) - 0.02) < 0.001 and abs(float(weights.mean())) < 0.001
    assert bool((models[0].norm == 1).all())


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_layers_of_a_gpu_are_computed_in_tiles(
    deterministic: bool, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 and without the native library a CPU has the product of a GPU, whose bits depend on the row count."""
    monkeypatch.setenv("QUIRE_CPU_NATIVE", "0")
    counts: list[int] = []
    plain = linear._linear
    monkeypatch.setattr(linear, "_linear", lambda x, *rest: counts.append(len(x)) or plain(x, *rest))  # type: ignore[func-returns-value]
    model = _model(single, torch.float16)
    config = EngineConfig(model=model.config, model_path=str(single), max_model_len=48, deterministic=deterministic)
    fill_model(model, config, torch.float16, torch.device("cuda"), progress=False)
    counts.clear()
    layers = [m for m in model.modules() if isinstance(m, linear.Linear) and m is not model.lm_head]
    for layer in layers:
        assert layer(torch.ones(3, layer.weight.shape[1], dtype=torch.float16)).shape == (3, len(layer.weight))
    tiles = {1, linear.TILE_ROWS} if deterministic else set()
    assert set(counts) <= tiles and bool(counts) == deterministic
