"""The draft model: computes every token once, respects blocks and budget, and drafts as for a new row."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from draft_batches import DraftBatch
from inprocess import InProcessEngine

from quire.protocol.config import EngineConfig, SpeculativeConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import ModelConfig, load_model_config
from quire.worker_proc.attention.cpu import CpuBackend
from quire.worker_proc.drafts.draft_model import DraftModel, DraftModelProposer
from quire.worker_proc.drafts.draft_sampling import DraftSampler
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.draft_setup import load_draft, plan_draft
from quire.worker_proc.startup.memory import plan_memory

CPU = torch.device("cpu")
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    make_checkpoint(folder, "mistral")  # its layers have a window of 8 tokens
    return folder


def config_of(folder: Path) -> EngineConfig:
    model = load_model_config(folder)
    return EngineConfig(
        model=model,
        model_path=str(folder),
        max_model_len=64,
        block_size=BLOCK,
        num_speculative_tokens=4,
        speculative=SpeculativeConfig(method="draft_model", model=model, model_path=str(folder)),
    )


def load(folder: Path, num_blocks: int) -> DraftModel:
    def build(config: ModelConfig, place: torch.device | str) -> Decoder:
        return build_model(config, torch.float32, place, 64)

    plan = plan_draft(config_of(folder), build, "float32")
    assert plan is not None
    assert plan.weight_bytes == sum(p.numel() * 4 for p in build(plan.config.model, "meta").parameters())
    return load_draft(plan, num_blocks, CpuBackend(), CPU, progress=False)


def make(
    folder: Path, *, num_blocks: int = 65, max_rows: int = 4, max_step_tokens: int = 64
) -> tuple[DraftBatch, DraftModelProposer]:
    rows = DraftBatch(max_rows, 64)
    sampler = DraftSampler(rows.batch, CPU, keeps=False)
    return rows, DraftModelProposer(load(folder, num_blocks), rows.batch, CPU, 4, max_step_tokens, sampler)


def alone(folder: Path, text: list[int], count: int, **sampling: object) -> list[int]:
    """Return the drafts for a new row with this text."""
    rows, proposer = make(folder)
    rows.change([], {7: text}, **sampling)
    return proposer.propose({0: count}).get(0, [])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_do_not_depend_on_earlier_drafts(folder: Path, temperature: float) -> None:
    rows, proposer = make(folder)
    rows.change([], {7: [5, 9, 30]}, temperature=temperature)
    for kept, then in ((4, [50]), (2, [51]), (0, [52]), (1, [53]), (3, []), (4, [54, 55, 56])):
        drafts = proposer.propose({0: 4})[0]
        assert drafts == alone(folder, rows.text(7), 4, temperature=temperature)
        proposer.check()
        rows.extend(7, drafts[:kept] + then)


def test_rows_are_added_moved_and_removed(folder: Path) -> None:
    rows, proposer = make(folder)
    texts = {h: [(h * k) % 90 + 3 for k in range(3 * h, 3 * h + 5 * h)] for h in (1, 2, 3, 4)}
    rows.change([], texts, temperature=0.0)
    for removed, new in (([], {}), ([1], {}), ([3], {5: [8, 8, 9]}), ([2], {6: [4] * 20, 8: [9]}), ([4, 5], {})):
        rows.change(removed, new, temperature=0.0)
        held = sorted(rows.batch.row_of)
        drafts = proposer.propose({rows.batch.row(h): 3 for h in held})
        for handle in held:
            assert drafts[rows.batch.row(handle)] == alone(folder, rows.text(handle), 3, temperature=0.0)
            rows.extend(handle, drafts[rows.batch.row(handle)][:2])
        proposer.check()
    rows.change(list(rows.batch.row_of), {})
    assert proposer.num_free_blocks == 64


def test_row_far_behind_catches_up_over_steps_without_delaying_others(folder: Path) -> None:
    rows, proposer = make(folder, max_step_tokens=10)
    rows.change([], {1: [3, 4, 5], 2: list(range(10, 35))}, temperature=0.0)
    assert set(proposer.propose({0: 2, 1: 2})) == {0}
    steps = 1
    while True:
        rows.extend(1, [20])
        drafts = proposer.propose({0: 2, 1: 2})
        steps += 1
        assert drafts[0] == alone(folder, rows.text(1), 2, temperature=0.0)
        if 1 in drafts:
            break
    assert steps == 3  # 7 + 9 + 9 tokens
    assert drafts[1] == alone(folder, rows.text(2), 2, temperature=0.0)


def test_without_blocks_there_are_no_drafts(folder: Path) -> None:
    rows, proposer = make(folder, num_blocks=1 + 4)
    rows.change([], {1: [3] * 10, 2: [4] * 10}, temperature=0.0)
    assert set(proposer.propose({0: 2, 1: 2})) == {0}
    proposer.check()
    rows.change([1], {})
    assert set(proposer.propose({rows.batch.row(2): 2})) == {rows.batch.row(2)}
    assert proposer.num_free_blocks == 1


def test_drafts_end_at_the_longest_length(folder: Path) -> None:
    rows, proposer = make(folder)
    rows.change([], {1: [3] * 62, 2: [4] * 64}, temperature=0.0)
    drafts = proposer.propose({0: 4, 1: 4})
    assert [len(drafts.get(row, [])) for row in (0, 1)] == [2, 0]


def test_draft_model_with_another_vocabulary_is_rejected(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", vocab_size=98)
    chosen = SpeculativeConfig(method="draft_model", model=load_model_config(tmp_path), model_path=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        InProcessEngine(folder, num_speculative_tokens=2, speculative=chosen)
    for part in (str(folder), str(tmp_path), "97", "98"):
        assert part in str(error.value)


def test_missing_checkpoint_is_rejected(folder: Path, tmp_path: Path) -> None:
    absent = str(tmp_path / "nothing")
    chosen = SpeculativeConfig(method="draft_model", model=load_model_config(folder), model_path=absent)
    with pytest.raises(ConfigError) as error:
        InProcessEngine(folder, num_speculative_tokens=2, speculative=chosen)
    assert str(folder) in str(error.value)
    assert absent in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "oracle"}, "oracle"),
        ({"method": "draft_model"}, "needs a draft model"),
        ({"method": "ngram", "acceptance": "rejection"}, "rejection needs"),
        ({"method": "ngram", "acceptance": "always"}, "always"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup"),
        ({"method": "suffix", "suffix_max_depth": 0}, "suffix_max_depth"),
    ],
)
def test_invalid_settings_are_rejected(folder: Path, settings: dict[str, object], message: str) -> None:
    chosen = SpeculativeConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        InProcessEngine(folder, num_speculative_tokens=2, speculative=chosen)


def test_memory_plan_includes_the_draft_model(folder: Path) -> None:
    config = config_of(folder)
    layout = kv_layout(config.model, BLOCK, "float32")
    plain = plan_memory(config, layout, 1000, CPU)
    doubled = plan_memory(config, layout, 1000, CPU, layout.block_bytes)
    assert doubled.num_blocks == plain.num_blocks // 2
    assert doubled.kv_cache == doubled.num_blocks * 2 * layout.block_bytes
