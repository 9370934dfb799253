"""gpt-oss with experts that stay packed in MXFP4: what a rank holds, transformers' tokens, and bad checkpoints."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_tokens, pack_experts
from dense_attention import DenseBackend
from inprocess import InProcessEngine
from model_steps import Rows
from packed_models import resident_bytes
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRank, on_ranks
from tiers import covering, thinned

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.mlp import SparseMlp
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import init_dummy_weights, load_weights

Factory = Callable[..., tuple[Path, Any]]
Tensors = dict[str, torch.Tensor]

FILE = "model.safetensors"
EXPERTS = "model.layers.1.mlp.experts"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
"""Three groups of 32 columns, for two ranks."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def checkpoint(checkpoint_factory: Factory, tmp_path: Path) -> tuple[Path, Any]:
    """Return a folder with packed experts, and transformers' model with the same experts in float32."""
    folder, model = checkpoint_factory("gpt_oss", **SIZES)
    folder = shutil.copytree(folder, tmp_path / "packed")
    model = copy.deepcopy(model)
    assert not model.load_state_dict(pack_experts(folder), strict=False).unexpected_keys
    return folder, model


@pytest.fixture
def folder(checkpoint: tuple[Path, Any]) -> Path:
    return checkpoint[0]


def _build(folder: Path, parallel: ThreadRank | None = None, device: str = "cpu") -> Decoder:
    return build_model(load_model_config(folder), torch.float32, device, parallel=parallel)


def _load(folder: Path, parallel: ThreadRank | None = None) -> Decoder:
    model = _build(folder, parallel)
    load_weights(model, folder, torch.float32, progress=False)
    return model


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)


def _set(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def _refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _experts(model: Decoder) -> list[SparseMlp]:
    return [module for module in model.modules() if isinstance(module, SparseMlp)]


def test_ranks_hold_whole_groups_of_the_stored_bytes(folder: Path) -> None:
    """Rows of gate and up stay interleaved. Of three groups one rank has the first, the other the rest."""
    stored = load_file(folder / FILE)
    for size, widths in ((1, [96]), (2, [32, 64])):
        ranks = on_ranks(size, lambda rank: _experts(_load(folder, rank))[1])
        assert [rank.part.stop - rank.part.start for rank in ranks] == widths
        for name, dimension in (("gate_up", 1), ("down", 2)):
            for kind, field in (("blocks", name), ("scales", f"{name}_scales")):
                whole = torch.cat([getattr(rank.experts, field) for rank in ranks], dimension)
                assert torch.equal(whole, stored[f"{EXPERTS}.{name}_proj_{kind}"])


def test_resident_weights_are_at_most_a_tenth_larger_than_the_file(folder: Path) -> None:
    """On ``meta``, as the memory plan counts them, as loaded, and in the layouts of the CPU library."""
    most = 1.1 * sum(tensor.nbytes for tensor in load_file(folder / FILE).values())
    model = _load(folder)
    for built in (_build(folder, device="meta"), model):
        assert sum(p.nbytes for p in built.parameters()) <= most
    model.prepack()
    assert resident_bytes(model) <= most


@pytest.mark.parametrize(("native", "deterministic"), covering(["1", "0"], [False, True]))
def test_tokens_equal_transformers(
    native: str, deterministic: bool, checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, and decode steps of one to three tokens per expert, with and without the CPU library."""
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    folder, reference = checkpoint
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (3, 17, 40, 40)]
    settings: dict[str, Any] = {"dtype": "float32", "long_prefill_token_threshold": 13, "deterministic": deterministic}
    engine = InProcessEngine(folder, max_model_len=96, **settings)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=8)
    answers = engine.run()
    for index, prompt in enumerate(prompts):
        assert answers[str(index)].tokens == greedy_tokens(reference, [prompt], 8)[0]


def test_two_ranks_give_the_logits_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    prompt = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(5))

    def on_rank(parallel: ThreadRank) -> torch.Tensor:
        return Rows(_load(folder, parallel), [20], DenseBackend()).step({0: prompt})[0]

    expected = reference(prompt[None]).logits[0]
    for logits in on_ranks(2, on_rank):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("native", thinned(["1", "0"], keep=1))
def test_deterministic_bits_do_not_depend_on_the_batch(
    native: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CPU_NATIVE", native)
    model = _load(folder)
    model.prepack(deterministic=True)
    first, second = _experts(model)[0].experts.packed[2]
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(6))
    alone = torch.cat([first(row) for row in x.split(1)])
    for rows in (2, 9, 40):
        assert torch.equal(torch.cat([first(part) for part in x.split(rows)]), alone)
    assert second(alone[:, ::2]).shape == (40, 64)


def test_dummy_weights_of_ranks_are_parts_of_the_whole(folder: Path) -> None:
    def filled(parallel: ThreadRank | None) -> Decoder:
        model = _build(folder, parallel)
        init_dummy_weights(model, seed=5)
        return model

    prompt = torch.arange(3, 23)
    expected = Rows(filled(None), [20], DenseBackend()).step({0: prompt})[0]
    assert bool(expected.isfinite().all()) and float(expected.std()) > 0
    for logits in on_ranks(2, lambda rank: Rows(filled(rank), [20], DenseBackend()).step({0: prompt})[0]):
        torch.testing.assert_close(logits, expected)


class TestRefusal:
    def test_more_ranks_than_groups(self, folder: Path) -> None:
        message = "expert width 96 must be a multiple of 32, with at least 32 for each of the 4 ranks"
        with pytest.raises(ConfigError, match=message):
            on_ranks(4, lambda rank: _build(folder, rank, "meta"))
        moe = load_model_config(folder).moe
        assert moe is not None and [ranks for ranks in range(1, 6) if moe.divides_among(ranks)] == [1, 2, 3]

    @pytest.mark.parametrize(
        ("field", "message"),
        [
            ("intermediate_size", "expert width 80 must be a multiple of 32"),
            ("hidden_size", r"hidden_size that is a multiple of 32 \(got 80\)"),
        ],
    )
    def test_sizes_that_are_no_multiple_of_a_group(self, field: str, message: str, folder: Path) -> None:
        _set(folder, **{field: 80})
        with pytest.raises(ConfigError, match=message):
            _build(folder, device="meta")

    @pytest.mark.parametrize("kind", ["blocks", "scales"])
    def test_one_of_the_pair_is_missing(self, kind: str, folder: Path) -> None:
        _edit(folder, lambda t: t.pop(f"{EXPERTS}.down_proj_{kind}"))
        assert f"tensor {EXPERTS}.down_proj_{kind} is missing" in _refused(folder)

    @pytest.mark.parametrize(("kind", "shape"), [("scales", [4, 64, 3]), ("blocks", [4, 64, 3, 16])])
    def test_wrong_shapes(self, kind: str, shape: list[int], folder: Path) -> None:
        name = f"{EXPERTS}.down_proj_{kind}"
        _edit(folder, lambda t: t.update({name: t[name][..., :1]}))
        found = [*shape[:-1], 1]
        assert f"tensor {name} has shape {found}, but config.json requires {shape}" in _refused(folder)

    def test_wrong_dtype(self, folder: Path) -> None:
        name = f"{EXPERTS}.down_proj_scales"
        _edit(folder, lambda t: t.update({name: t[name].bfloat16()}))
        assert f"tensor {name} has dtype BF16; supported: U8" in _refused(folder)

    @pytest.mark.parametrize("scale", [253, 255])
    def test_scales_without_finite_numbers(self, scale: int, folder: Path) -> None:
        name = f"{EXPERTS}.gate_up_proj_scales"
        _edit(folder, lambda t: t[name].view(-1)[7:8].fill_(scale))
        assert f"tensor {name} has a scale of {scale}; numbers are finite in float32 up to 252" in _refused(folder)

    def test_packed_experts_without_the_setting(self, folder: Path) -> None:
        _set(folder, quantization_config=None)
        assert "is in MXFP4, but config.json has no quantization_config with quant_method mxfp4" in _refused(folder)


def test_blocks_and_scales_may_be_in_different_files(folder: Path) -> None:
    model = _load(folder)
    files: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in load_file(folder / FILE).items():
        files["b.safetensors" if name.endswith("_scales") else "a.safetensors"][name] = tensor.clone()
    for file, content in files.items():
        save_file(content, folder / file)
    index = {name: file for file, content in files.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / FILE).unlink()
    for expected, found in zip(model.parameters(), _load(folder).parameters(), strict=True):
        assert torch.equal(expected, found)
