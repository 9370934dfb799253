"""Deterministic mode of models of transformers: a token's bits do not depend on the rest of its step."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inprocess import InProcessEngine
from measured_here import measure_here
from tiny_models import make_tiny
from torch import nn

from quire.protocol.errors import ConfigError
from quire.worker_proc.models.transformers.deterministic import settle
from quire.worker_proc.models.transformers.linears import compute_by
from quire.worker_proc.models.transformers.tokenwise import DependsOnValues, TokenTensors

WIDTH = 21
"""No multiple of a vector register, so that tokens of a batch begin at different places in one."""


class Mixed(nn.Module):
    """Views, writes to them, reductions, products, and a choice by index."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(torch.ones(2 * WIDTH), x.view(-1, WIDTH), self.weight)
        gate, up = y.chunk(2, -1)
        gate[:, ::2] = F.silu(gate[:, 1::2].repeat(1, 2)[:, : (WIDTH + 1) // 2])
        gate.mul_(torch.sigmoid(up))
        best = gate.topk(3).indices
        mixed = torch.cat([gate.gather(1, best), self.weight[best[:, 0], :WIDTH]], 1).softmax(-1)
        out = torch.zeros_like(gate).index_add_(0, torch.zeros(1, dtype=torch.int64), torch.tanh(mixed[:, 3:] + up))
        return (out - out.mean(-1, keepdim=True)).exp().unsqueeze(0)


class Router(nn.Module):
    """Returns numbers, which other code reads."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.tanh(), int(x.sum() > 0)


class Chosen(nn.Module):
    """Loops over the experts that are used, and adds to a tensor that no token has made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.router = kind, Router()
        self.experts = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        if self.kind == "router":
            gate, chosen = self.router(rows)
            return (gate * self.experts[chosen]).view(x.shape)
        of_row, out = rows.argmax(-1) % 4, torch.zeros(len(rows), WIDTH)
        if self.kind == "plain":
            return out.index_add_(0, torch.arange(len(rows)), rows * self.experts[of_row]).view(x.shape)
        for expert in of_row.unique():
            here = (of_row == expert).nonzero()[:, 0]
            out[here] = rows[here] * self.experts[expert]
        return out.view(x.shape)


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = Mixed(), Chosen(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.mlp(x)


@torch.inference_mode()
def test_a_tokens_bits_are_those_that_it_has_alone() -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(64, 1, 1, WIDTH)
    alone = torch.stack([model(token) for token in x])
    for order in (torch.arange(64), torch.arange(63, 0, -3), torch.tensor([5])):
        found: Any = model(TokenTensors.of(x[order]))
        assert torch.equal(found.batch(), alone[order])


def test_a_batch_is_made_again_after_a_write() -> None:
    tokens = TokenTensors.of(torch.ones(3, 1, 2))
    before = tokens.batch()
    assert tokens.batch() is before
    tokens[:, 1:].add_(1)
    assert tokens.batch().tolist() == [[[1, 2]]] * 3
    with pytest.raises(DependsOnValues, match="to one tensor"):
        torch.zeros(1, 2).add_(tokens)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["loop", "plain", "router"])
def test_code_that_reads_values_is_called_for_one_token_at_a_time(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Around(kind), torch.randn(9, 1, 1, WIDTH)
    alone = torch.stack([model(token) for token in x])

    def run() -> torch.Tensor:
        found: Any = model(TokenTensors.of(x))
        return found.batch()

    assert torch.equal(settle(model, {model.norm}, run, adapted=False), alone)
    assert "forward" in vars(model.mlp) and "forward" not in vars(model.norm)


@torch.inference_mode()
def test_what_needs_all_tokens_is_refused_by_name() -> None:
    model = Around("loop")
    with pytest.raises(ConfigError, match=r"--deterministic is not supported for Chosen .* by values \(aten\.\w*uni"):
        settle(model, {model.mlp}, lambda: model(TokenTensors.of(torch.ones(4, 1, 1, WIDTH))), adapted=False)
    compute_by(model.mlp, {model.mlp.router: model.mlp.router.forward})
    with pytest.raises(ConfigError, match=r"Chosen of transformers, which .*, and has layers for adapters: omit the"):
        settle(model, set(), lambda: model(TokenTensors.of(torch.ones(4, 1, 1, WIDTH))), adapted=True)


KV_HEADS = {"num_key_value_heads": 2, "head_dim": 10}
ODD = {"hidden_size": 40, "intermediate_size": 50}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": ODD | {"n_inner": 50},
    "gpt_neox": ODD | {"hidden_act": "gelu_new"},
    "llama": ODD | {"num_key_value_heads": 2},
    "gemma2": ODD | KV_HEADS,
    "phi3": ODD | {"num_key_value_heads": 2, "pad_token_id": 0},
    "qwen3_moe": ODD | KV_HEADS | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {},
    "qwen3_next": {},
}
"""Products of its own and tanh; GELU; gates; soft caps; packed projections; experts, with latents, and with states."""
ALL = list(product((512, 24, 64), (True, False), (200, 16)))
"""Tokens in a step, prefix cache, blocks."""
SOME = [(512, True, 200), (24, False, 16), (64, True, 16)]

START = [3 + 7 * i % 90 for i in range(70)]
PROMPTS = [START[: 70 - 3 * n] + [5 + (11 * i + 17 * n) % 90 for i in range(9 * n + 1)] for n in range(3)]


@pytest.mark.parametrize("ways", [pytest.param(SOME, id="some"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.full
def test_bits_of_whole_engines(
    family: str, dtype: str, ways: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_here(monkeypatch)
    make_tiny(tmp_path, family, **FAMILIES[family])
    wanted: dict[int, Any] = {}
    preemptions = hits = 0
    for chunk, cached, blocks in ways:
        settings: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": dtype, "max_num_batched_tokens": chunk}
        settings |= {"enable_prefix_caching": cached, "num_blocks_override": blocks, "block_size": 8}
        settings |= {"max_num_seqs": 4, "max_model_len": 112, "model_impl": "transformers"}
        engine = InProcessEngine(tmp_path, deterministic=True, **settings)
        for turn, requests in enumerate([[0, 1, 2], [2, 0, 1], [1]]):
            for index in requests:
                engine.add(f"{turn} {index}", PROMPTS[index], max_tokens=16, logprobs=3)
            for name, answer in engine.run().items():
                found = answer.tokens, [bytes(each) for each in answer.logprobs]
                assert wanted.setdefault(int(name.split()[1]), found) == found, (chunk, cached, blocks, name)
        preemptions += engine.statistics().num_preemptions
        hits += engine.statistics().prefix_cache_hit_tokens
    assert preemptions > 0 and hits > 0
