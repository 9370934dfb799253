"""The GPU's step, with kernels in Triton's interpreter, compared with the CPU's; run by test_gpu_step.py.

Both runners receive the same diffs. Without a GPU there are no graphs: the step that would be captured is launched.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapters import make_adapter
from side_parts import parts_of

from quire.kernels.lora.lora import launch_adapters
from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.model.adapter import read_adapter
from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.model.latent_config import LatentConfig
from quire.protocol.model.model_config import ModelConfig, MoeConfig
from quire.protocol.model.vision_config import VisionConfig
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.item_messages import InputItem
from quire.protocol.wire.side_rows import ROUTED_EXPERTS
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.adapters.packed import pack_adapter
from quire.worker_proc.adapters.sites import AdapterSites
from quire.worker_proc.attention import triton_backend
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.attention.triton_backend import TritonBackend
from quire.worker_proc.batch import shared_prefixes
from quire.worker_proc.batch.input_batch import StepRefused
from quire.worker_proc.execute.decode_graphs import capture_sizes
from quire.worker_proc.execute.model_runner import ModelRunner
from quire.worker_proc.models.ops import Ops, TorchOps
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.models.routes import Routes
from quire.worker_proc.models.triton_ops import TritonOps
from quire.worker_proc.startup.loader import init_dummy_weights

NUM_BLOCKS = 40
CPU = torch.device("cpu")
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    qk_norm="head",
    windows=[0, 6],
)
LAYOUT = KVLayout(
    [KVGroup("full_attention", 4, [0]), KVGroup("sliding_window", 4, [1], 6)],
    num_kv_heads=2,
    head_dim=16,
    dtype="float32",
)
CONFIG = EngineConfig(
    model=MODEL,
    model_path="",
    kv_cache_dtype="float32",
    load_format="dummy",
    max_model_len=48,
    max_num_seqs=4,
    block_size=4,
    encoder_cache_tokens=64,
)

NONE: Mapping[int, int] = MappingProxyType({})


class Scripted:
    """A proposer whose drafts are given: per call, row → drafts."""

    def __init__(self, *drafts: dict[int, list[int]]) -> None:
        self._drafts = list(drafts)

    def propose(self, wanted: Any) -> dict[int, list[int]]:
        return {row: own[: wanted[row]] for row, own in self._drafts.pop(0).items()}


def _runner(
    backend: AttentionBackend,
    ops: Ops,
    drafts: tuple[dict[int, list[int]], ...],
    kv_dtype: str,
    adapters: Sequence[Path],
    shape: ModelConfig,
) -> ModelRunner:
    config = CONFIG
    if drafts:
        speculative = SpeculativeConfig(method="ngram")
        config = msgspec.structs.replace(CONFIG, num_speculative_tokens=3, speculative=speculative)
    config = msgspec.structs.replace(config, model=shape)
    sites = AdapterSites(3, 8, 64, torch.float32, CPU, launch_adapters) if adapters else None
    routes = None if shape.moe is None else Routes(shape.moe)
    model = build_model(shape, torch.float32, CPU, CONFIG.max_model_len, ops=ops, additions=sites, routes=routes)
    init_dummy_weights(model, seed=3)
    for name, slot in model.weight_slots().items():
        if not name.endswith("norm.weight"):
            slot.target.mul_(12)  # with the usual 0.02 all logits are nearly equal
    groups = LAYOUT.groups if shape.latent is None else [KVGroup("latent_attention", 4, [layer]) for layer in (0, 1)]
    groups = [LAYOUT.groups[0], KVGroup("chunked_local", 4, [1], shape.chunk(1))] if shape.chunks else groups
    layout = KVLayout(groups, shape.num_kv_heads, shape.head_dim, kv_dtype)
    runner = ModelRunner(config, layout, NUM_BLOCKS, model, backend, CPU)
    if drafts:
        runner._proposer = Scripted(*drafts)
    for slot, folder in enumerate(adapters):
        assert sites is not None and runner.adapters is not None
        runner.adapters.fill(slot, pack_adapter(read_adapter(folder, shape, 8), sites))
        runner.adapters.occupy(slot, slot + 1)
    return runner


class Both:
    """Two runners that receive the same steps and must return the same tokens."""

    def __init__(
        self,
        *drafts: dict[int, list[int]],
        fresh_from: int = 0,
        kv_dtype: str = "float32",
        adapters: Sequence[Path] = (),
        shape: ModelConfig = MODEL,
    ) -> None:
        self.host = _runner(CpuBackend(native=False), TorchOps(), drafts, kv_dtype, adapters, shape)
        backend = TritonBackend(CONFIG.max_num_seqs, fresh_from=fresh_from)
        self.device = _runner(backend, TritonOps(), drafts, kv_dtype, adapters, shape)
        self.steps = self.steady_steps = self.verify_steps = 0
        self.experts: list[list[tuple[int, int, list[list[int]]]]] = []
        """Routed experts of each step: (handle, start, rows)."""
        assert self.device.steady is not None
        launch = self.device.steady.launch

        def counted(*, sampling: bool) -> Any:
            self.steady_steps += 1
            return launch(sampling=sampling)

        self.device.steady.launch = counted  # type: ignore[method-assign]
        verify = self.device.steady.graphs.run_verify

        def verified(num_rows: int, num_tokens: int) -> Any:
            self.verify_steps += 1
            return verify(num_rows, num_tokens)

        self.device.steady.graphs.run_verify = verified  # type: ignore[method-assign]

    def step(self, **fields: Any) -> list[int]:
        self.steps += 1
        results = []
        for runner in (self.host, self.device):
            results.append(runner.execute(SchedulerOutput(self.steps, **fields)).result())
            runner.check()
        want, got = results
        assert (want.handles is None) == (got.handles is None)
        if want.handles is not None:
            np.testing.assert_array_equal(got.handles, want.handles)
        assert got.bad == want.bad
        for result in (want, got):
            parts = parts_of(result, ROUTED_EXPERTS)
            self.experts.append([(handle, start, rows.tolist()) for handle, start, (rows,) in parts])
        assert self.experts.pop() == self.experts[-1]
        if want.tokens is None:
            assert got.tokens is None
            return []
        np.testing.assert_array_equal(got.tokens, want.tokens)
        for own, wanted in zip(got.side, want.side, strict=True):
            for values, expected in zip(own.floats, wanted.floats, strict=True):
                np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
        return got.tokens.tolist()


def adding(
    *rows: tuple[int, list[int], list[int]], computed: int = 0, adapters: Mapping[int, int] = NONE, **sampling: Any
) -> dict[str, Any]:
    """Return diff fields that add (handle, tokens, blocks of group 0); the block ids of group 1 are 20 higher.

    ``adapters``: numbers of the adapters by handle.
    """
    params = SamplingParams(**{"temperature": 0.0} | sampling)
    new = [
        NewRequestData(h, f"r{h}", len(t), len(t), computed, [len(b)] * 2, params, 70 + h, adapters.get(h, 0))
        for h, t, b in rows
    ]
    return {
        "new_requests": new,
        "token_ids": np.array([t for _, tokens, _ in rows for t in tokens], np.int32),
        "block_ids": np.array([b + shift for _, _, blocks in rows for shift in (0, 20) for b in blocks], np.int32),
        "counts": [(h, len(t) - computed) for h, t, _ in rows if len(t) - computed != 1],
    }


def appending(handle: int, block: int) -> dict[str, Any]:
    return {
        "appended_handles": np.full(2, handle, np.int32),
        "appended_groups": np.array([0, 1], np.int32),
        "appended_block_ids": np.array([block, block + 20], np.int32),
    }


def test_steady_steps_with_added_and_removed_requests() -> None:
    both = Both()
    both.step(**adding((0, [5, 9, 2, 7, 7, 1], [1, 2, 3]), (1, [8, 8], [4, 5, 6])))
    for _ in range(3):
        both.step()
    assert both.steady_steps == 3
    both.step(**adding((2, [3, 1, 4], [7, 8, 9]), temperature=0.9, min_p=0.05))
    both.step()
    both.step(removed=[0])  # the last row fills row 0 and keeps its newest sampled token
    both.step()
    both.step(**appending(1, 10))
    both.step(**appending(2, 11))
    assert both.steady_steps == 8
    both.step(parked=[1])
    both.step(unparked=[1])
    both.step()
    assert both.steady_steps == 10


def test_steady_steps_and_drafts_over_borders_of_chunks() -> None:
    both = Both({0: [60, 2], 1: [60]}, shape=msgspec.structs.replace(MODEL, windows=[], chunks=[0, 6]))
    both.step(**adding((0, [5, 9, 2, 7, 7], [1, 2, 3, 4]), (1, [8, 8], [5, 6, 7, 10])))
    for _ in range(6):
        both.step()
    assert both.steady_steps == 6  # positions 5 to 10 and 2 to 7
    both.step(drafts=[(0, 3), (1, 3)], counts=[(0, 4), (1, 4)])
    assert both.verify_steps == 1


def test_request_admitted_with_one_token_to_compute() -> None:
    both = Both()
    both.step(**adding((0, [5, 9, 2, 7, 7, 1], [1, 2])))
    # Its first five tokens are in the blocks of the first request.
    fields = adding((1, [5, 9, 2, 7, 6], [1, 3]), computed=4)
    fields["block_ids"] = np.array([1, 3, 21, 23], np.int32)
    both.step(**fields)
    both.step()
    assert both.steady_steps == 2


def test_mixed_step_of_rows_with_a_common_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_KEYS", 4)
    monkeypatch.setattr(triton_backend, "MIN_SHARED_READS", 1)
    planned = []
    plan = triton_backend.plan_attention

    def counted(*args: Any, **options: Any) -> Any:
        planned.append(options["common_prefix_len"])
        return plan(*args, **options)

    monkeypatch.setattr(triton_backend, "plan_attention", counted)
    both = Both()
    both.step(**adding((0, [5, 9, 2, 7, 7, 1], [1, 2, 3])))
    fields = adding((1, [5, 9, 2, 7, 6, 8], [1, 4, 5]), computed=4)
    fields["block_ids"] = np.array([1, 4, 5, 21, 24, 25], np.int32)
    both.step(**fields)
    assert planned == [0, 0, 4, 0]  # full attention and a window, in each step
    both.step()
    assert both.steady_steps == 1


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.8}, {"logprobs": 2}], ids=str)
def test_sampler_uses_the_graphs_logits(sampling: dict[str, Any]) -> None:
    both = Both()
    both.step(**adding((0, [5, 9, 2], [1, 2, 3]), (1, [8, 8, 1], [4, 5]), temperature=0.8, **sampling))
    for _ in range(3):
        both.step()
    assert both.steady_steps == 3


def test_refuses_token_without_a_block() -> None:
    both = Both()
    both.step(**adding((0, [5, 9, 2], [1])))
    both.step()
    for runner in (both.host, both.device):
        with pytest.raises(StepRefused, match="has no block for position"):
            runner.execute(SchedulerOutput(3))


def test_fresh_attention_leaves_the_same_cache() -> None:
    both = Both(fresh_from=2)
    both.step(**adding((0, [5, 9, 2, 7, 7], [1, 2]), (1, [8, 8], [4, 5])))
    both.step()
    both.step(**adding((2, [3, 1, 4, 1], [7, 8])))  # together with decoding rows, the prompt uses the cache
    both.step()


def test_fp8_cache_with_scales_per_head() -> None:
    both = Both(kv_dtype="float8_e4m3fn")
    for runner in (both.host, both.device):
        scales = torch.tensor([0.01, 2.0]), torch.tensor([0.5, 0.03])
        runner.forward.model.set_kv_scales({0: scales, 1: scales[::-1]})
    both.step(**adding((0, [5, 9, 2, 7, 7, 1], [1, 2, 3]), (1, [8, 8], [4, 5, 6])))
    for _ in range(3):
        both.step()
    assert both.steady_steps == 3
    both.step(**adding((2, [3, 1, 4], [7, 8])))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20}], ids=["greedy", "random"])
def test_drafts_of_several_lengths(sampling: dict[str, Any]) -> None:
    """The drafts are right, partly right and wrong; a row without drafts is between rows with some."""
    rows = (0, [5, 9, 2, 7, 7, 1], [1, 2, 3, 4]), (1, [8, 8], [5, 6, 7]), (2, [3, 1, 4], [8, 9, 10])
    plain = Both()
    plain.step(**adding(*rows, **sampling))
    follow = list(zip(*(plain.step() for _ in range(4)), strict=True))
    right = list(follow[0][:2])
    both = Both({0: [*right, 60], 2: [60]}, {0: [60], 1: list(follow[1][1:3])}, {})
    both.step(**adding(*rows, **sampling))
    drafting = {"drafts": [(0, 3), (1, 3), (2, 3)], "counts": [(0, 4), (1, 4), (2, 4)]}
    first = both.step(**drafting)
    assert first[:3] == list(follow[0][:3]) and len(first) == 5
    both.step(**drafting)
    both.step(**drafting)  # none were found
    assert both.verify_steps == 3
    both.step()  # steady decode after drafts: the newest tokens are on the host
    assert both.steady_steps == 1
    both.step(**adding((3, [4, 4], [11, 12]), **sampling))


def test_rotary_positions_behind_an_image() -> None:
    """An image of 2 by 3 rows takes 3 positions: steady steps and those with drafts follow with other positions."""
    vision = VisionConfig("", 7, mrope_section=(4, 2, 2), mrope_interleaved=True, num_deepstack=1)
    both = Both({0: [60]}, {}, shape=msgspec.structs.replace(MODEL, vision=vision))
    rows = torch.randn(2, 6, MODEL.hidden_size, generator=torch.Generator().manual_seed(1))
    image = InputItem(bytes(32), [(2, 6)], "", grid=(1, 4, 6))
    for runner in (both.host, both.device):
        runner.items.rows[image.key] = rows
    fields = adding((0, [5, 9, 7, 7, 7, 7, 7, 7, 3], [1, 2, 3, 4, 5]), (1, [8, 8], [6, 7, 8]))
    fields["new_requests"][0] = msgspec.structs.replace(fields["new_requests"][0], items=[image])
    both.step(**fields | {"counts": [(0, 4), (1, 2)]})
    both.step(counts=[(0, 5)])
    assert both.device.batch.rope_offset.tolist() == [-3, 0, 0, 0]
    both.step()
    both.step(drafts=[(0, 3)], counts=[(0, 4)])
    both.step()
    assert (both.steady_steps, both.verify_steps) == (2, 1)
    both.step(removed=[1])
    both.step()


def test_image_that_attends_in_both_directions() -> None:
    item = InputItem(bytes(32), [(2, 6)], "")
    vision = VisionConfig("", 7, is_causal=False)
    both = Both(shape=msgspec.structs.replace(MODEL, vision=vision))
    rows = torch.randn(1, 6, MODEL.hidden_size, generator=torch.Generator().manual_seed(1))
    fields = adding((0, [5, 9, 7, 7, 7, 7, 7, 7, 3], [1, 2, 3, 4, 5]), (1, [8, 8], [6, 7, 8]))
    fields["new_requests"][0] = msgspec.structs.replace(fields["new_requests"][0], items=[item])
    for runner in (both.host, both.device):
        runner.items.rows[item.key] = rows
        with pytest.raises(StepRefused, match=r"handle 0 must compute item 0{16} up to 8"):
            runner.execute(SchedulerOutput(1, **fields | {"counts": [(0, 4), (1, 2)]}))
    both.step(**fields | {"counts": [(0, 8), (1, 2)]})
    both.step()
    both.step()
    assert both.steady_steps == 2


@pytest.fixture
def two_adapters(tmp_path: Path) -> list[Path]:
    ranks = {"a": 5, "b": 8}
    return [make_adapter(tmp_path / name, MODEL, rank=rank, seed=rank, size=1.0) for name, rank in ranks.items()]


def test_steady_steps_with_adapters(two_adapters: list[Path]) -> None:
    """Rows with either adapter and without one; rows move, and a step without adapters follows."""
    both = Both(adapters=two_adapters)
    rows = (0, [5, 9, 2, 7, 7, 1], [1, 2, 3]), (1, [5, 9, 2, 7, 7, 1], [4, 5, 6]), (2, [5, 9, 2, 7, 7, 1], [7, 8, 9])
    firsts = [both.step(**adding(*rows, adapters={1: 2, 2: 1}))]
    firsts += [both.step() for _ in range(3)]
    assert len({tuple(column) for column in zip(*firsts, strict=True)}) == 3, "all three rows differ"
    both.step(removed=[0])
    both.step()
    both.step(removed=[1, 2], **adding((3, [3, 1, 4], [1, 2])))
    both.step()
    assert both.steady_steps == 6


def test_drafts_with_adapters(two_adapters: list[Path]) -> None:
    rows = (0, [5, 9, 2, 7, 7, 1], [1, 2, 3, 4]), (1, [8, 8], [5, 6, 7])
    both = Both({0: [60, 2], 1: [60]}, {1: [7]}, adapters=two_adapters)
    both.step(**adding(*rows, adapters={1: 2}))
    for _ in range(2):
        both.step(drafts=[(0, 3), (1, 3)], counts=[(0, 4), (1, 4)])
    assert both.verify_steps == 2
    both.step()
    assert both.steady_steps == 1


EXPERTS = msgspec.structs.replace(
    MODEL,
    architecture="Qwen3MoeForCausalLM",
    moe=MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=16, layers=[0, 1]),
)


def test_adapters_that_change_experts(tmp_path: Path) -> None:
    """Steps with such an adapter compute experts one by one, with padding neither in decode nor with drafts."""
    experts = make_adapter(tmp_path / "a", EXPERTS, rank=5, seed=1, size=2.0)
    attention = make_adapter(tmp_path / "b", EXPERTS, seed=2, size=2.0, projections=("q_proj", "o_proj"))
    both = Both({0: [60, 2], 1: [60]}, {0: [60]}, adapters=[experts, attention], shape=EXPERTS)
    prompt = [5, 9, 2, 7, 7, 1]
    rows = (0, prompt, [1, 2, 3, 4]), (1, prompt, [5, 6, 7, 8]), (2, prompt, [9, 10, 11, 12])
    firsts = [both.step(**adding(*rows, adapters={1: 1, 2: 2}))]
    firsts += [both.step() for _ in range(3)]
    assert len({tuple(column) for column in zip(*firsts, strict=True)}) == 3, "all three rows differ"
    assert both.steady_steps == 3
    drafting = {"drafts": [(0, 3), (1, 3)], "counts": [(0, 4), (1, 4)]}
    both.step(**drafting)
    assert both.verify_steps == 0, "a step that waits for the device cannot be captured"
    both.step(removed=[1])
    both.step(drafts=[(0, 3)], counts=[(0, 4)])
    assert both.verify_steps == 1, "no adapter that is left changes experts"


def test_experts_of_steady_steps_and_of_drafts() -> None:
    """A batch of three rows is padded to four; a row that does not ask is among them."""
    both = Both({0: [60, 2], 2: [60]}, shape=EXPERTS)
    rows = (0, [5, 9, 2, 7, 7, 1], [1, 2, 3, 4]), (2, [8, 8], [5, 6, 7])
    both.step(**adding(*rows, return_routed_experts=True))
    both.step(**adding((1, [3, 1, 4], [8, 9, 10])))
    for _ in range(2):
        both.step()
    assert both.steady_steps == 2
    both.step(drafts=[(0, 3), (1, 3), (2, 3)], counts=[(0, 4), (1, 4), (2, 4)])
    assert both.verify_steps == 1
    both.step(removed=[0])
    spans = [[(handle, start, len(rows)) for handle, start, rows in step] for step in both.experts]
    assert spans[:4] == [[(0, 0, 6), (2, 0, 2)], *([(0, 6 + i, 1), (2, 2 + i, 1)] for i in range(3))]
    assert [handle for handle, _, _ in spans[4]] == [0, 2]
    (last,) = spans[5]
    assert last == (2, 5 + spans[4][1][2], 1)


LATENTS = msgspec.structs.replace(
    EXPERTS,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_dim=24,
    qk_norm="",
    windows=[],
    attention_scale=0.3,
    interleaved_rope=True,
    latent=LatentConfig(rank=16, rope_dim=8, nope_dim=12, value_dim=10, query_rank=20),
    moe=MoeConfig(
        num_experts=4,
        num_experts_per_token=2,
        intermediate_size=16,
        layers=[0, 1],
        sigmoid=True,
        num_groups=2,
        top_groups=1,
        scaling_factor=2.0,
        shared_width=16,
    ),
)


def test_latents_of_steady_steps_and_of_drafts() -> None:
    both = Both({0: [60, 2], 1: [60]}, shape=LATENTS)
    both.step(**adding((0, [5, 9, 2, 7, 7, 1], [1, 2, 3, 4]), (1, [8, 8], [5, 6, 7])))
    for _ in range(3):
        both.step()
    assert both.steady_steps == 3
    both.step(drafts=[(0, 3), (1, 3)], counts=[(0, 4), (1, 4)])
    assert both.verify_steps == 1


def test_capture_sizes_cover_every_batch() -> None:
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(1) == [1]
    sizes = capture_sizes(1000)
    assert sizes[-1] == 1000 and sizes[:5] == [1, 2, 4, 8, 16] and max(np.diff(sizes)) <= 32
