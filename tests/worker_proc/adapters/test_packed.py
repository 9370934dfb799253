"""Packed adapters: each rank's share of every matrix, in the sites' layout, for any order of the parts."""

import dataclasses
from pathlib import Path

import pytest
import torch
from adapters import Tensors, make_adapter
from thread_ranks import ThreadRank, on_ranks

from quire.kernels.lora.lora import add_adapters
from quire.protocol.model.adapter import Adapter, AdapterPart, read_adapter
from quire.protocol.model.model_config import ModelConfig, MoeConfig
from quire.worker_proc.adapters.packed import pack_adapter
from quire.worker_proc.adapters.sites import ALIGNMENT, AdapterSites
from quire.worker_proc.models.registry import build_model

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    moe=MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=24, layers=[1]),
)


def sites_of(parallel: ThreadRank | None = None, dtype: torch.dtype = torch.float32) -> AdapterSites:
    sites = AdapterSites(2, 8, 16, dtype, "cpu", add_adapters)
    build_model(MODEL, torch.float32, "cpu", parallel=parallel, activation_dtype=dtype, additions=sites)
    return sites


def sorted_adapter(folder: Path, *, reverse: bool = False) -> Adapter:
    """Return an adapter of all projections, in the order of their names or the reverse."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate")
    adapter = read_adapter(make_adapter(folder, MODEL, rank=3, projections=names), MODEL, 8)
    parts = sorted(adapter.parts, key=lambda part: (part.module[:15], names.index(part.module.rpartition(".")[2])))
    return dataclasses.replace(adapter, parts=tuple(parts[::-1] if reverse else parts))


def addends(sites: AdapterSites, adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return the matrix that is added to each projection's own share, from what is packed, ``[outputs, inputs]``."""
    packed = pack_adapter(adapter, sites)
    by_site = packed.parts(packed.memory)
    found = {}
    for name, target in sites.targets.items():
        cut = target.cut
        whole = torch.zeros(10_000, cut.num_columns)
        for part in by_site.get(target.site, []):
            assert part.a.data_ptr() % ALIGNMENT == part.b.data_ptr() % ALIGNMENT == 0
            whole[part.first : part.first + part.b.shape[1]] += part.scale * part.b.float().T @ part.a.float()
        found[name] = whole[target.first : target.first + cut.num_rows]
    return found


def product(part: AdapterPart) -> torch.Tensor:
    return part.scale * torch.from_numpy(part.b.float32()) @ torch.from_numpy(part.a.float32())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_parts_are_those_of_the_adapter(size: int, reverse: bool, tmp_path: Path) -> None:
    adapter = sorted_adapter(tmp_path / "a", reverse=reverse)
    wanted = {part.module: product(part) for part in adapter.parts}
    assert len(wanted) == 7 + 5 + 4 * 3

    def check(parallel: ThreadRank) -> None:
        sites = sites_of(parallel)
        got = addends(sites, adapter)
        assert got.keys() == wanted.keys()
        for name, own in got.items():
            cut = sites.targets[name].cut
            torch.testing.assert_close(own, wanted[name][cut.rows, cut.columns], atol=1e-6, rtol=1e-6)

    on_ranks(size, check)


def test_parts_that_share_a_stay_one(tmp_path: Path) -> None:
    """As those of a stored ``qkv_proj``: one product for queries, keys and values."""
    adapter = sorted_adapter(tmp_path / "a")
    sites, (q, k, v, *others) = sites_of(), adapter.parts
    fused = (q, dataclasses.replace(k, a=q.a), dataclasses.replace(v, a=q.a), *others)
    whole, shared = (pack_adapter(dataclasses.replace(adapter, parts=parts), sites) for parts in (adapter.parts, fused))
    site = sites.targets["model.layers.0.self_attn.q_proj"].site
    (part,) = shared.parts(shared.memory)[site]
    assert len(whole.parts(whole.memory)[site]) == 3 and tuple(part.b.shape) == (3, 64)
    assert len(whole.memory) - len(shared.memory) == 2 * 3 * 32 * 4
    expected = torch.cat([product(each) for each in fused[:3]])
    torch.testing.assert_close(part.scale * part.b.T @ part.a, expected, atol=1e-6, rtol=1e-6)


def test_slot_has_room_for_the_largest_adapter_without_experts(tmp_path: Path) -> None:
    def without_experts(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate")
    folder = make_adapter(tmp_path / "a", MODEL, rank=8, projections=names, change=without_experts)
    largest = read_adapter(folder, MODEL, 8)
    for dtype in (torch.float32, torch.bfloat16):
        sites = sites_of(dtype=dtype)
        assert len(pack_adapter(largest, sites).memory) == sites.slot_bytes
