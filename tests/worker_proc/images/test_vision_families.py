"""Greedy tokens of prompts with pictures are transformers', in float32, however the prompt is computed."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from item_steps import BLOCK_SIZE, ItemRunner
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRank, on_ranks
from tiers import thinned
from vision_checkpoints import CASES, Prompt, greedy_tokens, make_checkpoint, make_picture

from quire.protocol.wire.item_messages import InputItem

Factory = Callable[..., tuple[Path, Any]]
TOKENS = 6


@pytest.mark.parametrize("name", thinned(sorted(CASES, key=len), 2))
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, name)
    wide, tall = make_picture(model, name, 90, 40), make_picture(model, name, 30, 70, seed=1)
    one = Prompt([[5, 6, 8], wide, [9, 10]])
    three = Prompt([[5], wide, [6], tall, [9, 10, 11], make_picture(model, name, 60, 60, seed=2), [12]], first=2)
    wanted = [greedy_tokens(model, prompt, TOKENS) for prompt in (one, three)]
    assert wanted[0] != greedy_tokens(model, Prompt([[5, 6, 8], tall, [9, 10]]), TOKENS), "pictures change nothing"
    engine = ItemRunner(tmp_path)
    for prompt in (one, three):
        engine.encode_all(tmp_path, prompt)
    assert engine.generate([one, three], TOKENS) == wanted
    assert engine.generate([one, three], TOKENS, chunk=5) == wanted
    cached = (one.items[0].ranges[0][0] // BLOCK_SIZE + 1) * BLOCK_SIZE  # ends inside the first picture
    assert engine.generate([one, three], TOKENS, computed=cached) == wanted
    begun = [tokens[:3] for tokens in wanted]
    assert engine.generate([one, three], TOKENS, chunk=24, outputs=begun) == wanted


@pytest.mark.full
def test_experts_with_inputs_before_outputs(tmp_path: Path) -> None:
    """So are they in the files of Qwen3-VL-MoE's makers."""
    make_checkpoint(tmp_path, "qwen3_vl_moe")
    wanted = ItemRunner(tmp_path).generate([Prompt([[5, 6, 8]])], TOKENS)
    file = tmp_path / "model.safetensors"
    tensors = {name: each.mT if ".experts." in name else each for name, each in load_file(file).items()}
    save_file({name: each.contiguous() for name, each in tensors.items()}, file)
    assert ItemRunner(tmp_path).generate([Prompt([[5, 6, 8]])], TOKENS) == wanted


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_without_images_are_those_of_text(deterministic: bool, tmp_path: Path) -> None:
    """With ``--deterministic`` all steps have last keys, which choose the compiled kernels."""
    picture = make_picture(make_checkpoint(tmp_path, "gemma3"), "gemma3", 30, 70)
    prompt = Prompt([[5, 6], picture, [9, 10]])
    engine = ItemRunner(tmp_path, deterministic=deterministic)
    engine.encode_all(tmp_path, prompt)
    backend, batches = engine.runner.forward.backend, []
    plan = backend.plan
    backend.plan = lambda batch: (batches.append(batch), plan(batch))[1]  # type: ignore[method-assign]
    engine.generate([prompt], 3)
    begin, end = prompt.items[0].ranges[0][0], sum(prompt.items[0].ranges[0])
    assert batches[0].last_keys[begin:end].tolist() == [end - 1] * (end - begin)
    assert {batch.last_keys is None for batch in batches if len(batch.slot_mapping) == 1} == {not deterministic}


@pytest.mark.full
def test_two_ranks_have_the_tokens_of_one(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_vl")
    prompt = Prompt([[5, 6], make_picture(model, "qwen3_vl", 90, 40), [9, 10]])
    one_at_a_time = Lock()  # transformers switches off its random weights for the whole process

    def run(rank: ThreadRank) -> list[list[int]]:
        folder = tmp_path / str(rank.rank)
        folder.mkdir()
        with one_at_a_time:
            engine = ItemRunner(tmp_path, group=rank, tensor_parallel_size=2)
        engine.encode_all(folder, prompt)
        return engine.generate([prompt], TOKENS, chunk=5)

    assert on_ranks(2, run) == [[greedy_tokens(model, prompt, TOKENS)]] * 2


@pytest.mark.parametrize("family", ["llama", "gemma3", pytest.param("qwen3", marks=pytest.mark.full)])
def test_given_rows_are_like_their_tokens(family: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    """The whole prompt is given, so that the row's last prompt token, alone in its step, is given too."""
    folder, model = checkpoint_factory(family)
    ids = [5, 6, 8, 40, 41, 42, 43, 9, 11]
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.tensor(ids))
    engine = ItemRunner(folder)
    wanted = engine.generate([Prompt([ids])], TOKENS)
    save_file({"rows": rows}, tmp_path / "rows.safetensors")
    item = InputItem(bytes(32), [(0, len(ids))], "", "rows")
    assert not engine.encode(tmp_path / "rows.safetensors", item).problem
    given = Prompt([[0] * len(ids)])
    given.items.append(item)
    assert engine.generate([given], TOKENS) == wanted
    assert engine.generate([given], TOKENS, computed=len(ids) // BLOCK_SIZE * BLOCK_SIZE) == wanted
    assert engine.generate([given], TOKENS, chunk=1) == wanted
