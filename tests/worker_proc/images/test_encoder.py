"""Encodings that fail, and steps whose items are not there: each is answered, or refused before it changes a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from item_steps import ItemRunner
from safetensors.torch import save_file
from vision_checkpoints import Prompt, make_checkpoint, make_picture

from quire.protocol.errors import ConfigError
from quire.protocol.wire.item_messages import InputItem
from quire.worker_proc.batch.input_batch import StepRefused

HIDDEN = 64


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return folder, make_checkpoint(folder, "qwen3_vl")


def test_failed_encodings_are_answered_and_the_next_one_works(qwen: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = qwen
    engine = ItemRunner(folder)
    picture = make_picture(model, "qwen3_vl", 90, 40)
    whole = picture.save(tmp_path / "whole.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in ("absent", "text", "empty", "rows", "nan", "patches")}
    files["text"].write_bytes(b"x" * 100)
    save_file({"other": torch.zeros(3)}, files["empty"])
    save_file({"rows": torch.zeros(5, HIDDEN + 1)}, files["rows"])
    save_file({"rows": torch.tensor([[torch.nan] * HIDDEN] * 2)}, files["nan"])
    save_file(picture.tensors | {"image_grid_thw": torch.tensor([[1, 2, 100]])}, files["patches"])
    cases: list[tuple[Path, str, int, str]] = [
        (files["absent"], "image", 4, "the item's tensors cannot be read"),
        (files["text"], "image", 4, "the item's tensors cannot be read"),
        (files["empty"], "image", 4, "the item does not fit the model"),
        (files["patches"], "image", 50, "the item does not fit the model"),
        (whole, "image", picture.rows + 1, f"the item has {picture.rows} rows, and its prompt has {picture.rows + 1}"),
        (files["rows"], "rows", 5, f"the item must have the shape [5, {HIDDEN}] (got [5, {HIDDEN + 1}])"),
        (whole, "rows", 5, f"the item must have the shape [5, {HIDDEN}] (got absent)"),
        (files["nan"], "rows", 2, "the item has rows that are not finite"),
    ]
    for path, kind, rows, problem in cases:
        answer = engine.encode(path, InputItem(b"a", [(0, rows)], "", kind))
        assert problem in answer.problem and str(tmp_path) not in answer.problem, answer
        assert not engine.runner.items.rows
    first, second = (InputItem(name, [(0, picture.rows)], "") for name in (b"a", b"b"))
    assert not engine.encode(whole, first).problem
    assert engine.runner.items.rows[first.key].shape == (3, picture.rows, HIDDEN)
    engine.encode(whole, second, dropped=[first.key])
    assert list(engine.runner.items.rows) == [second.key]
    with pytest.raises(StepRefused, match=r"Encode of item 62\d+: it is there"):
        engine.encode(whole, second)
    engine.encoder.begin_worker_epoch()
    assert not engine.runner.items.rows
    engine.encoder.close()


REFUSED: list[tuple[str, Callable[[InputItem], list[InputItem]], str]] = [
    ("absent", lambda item: [msgspec.structs.replace(item, digest=b"x" * 32)], "needs the rows of item 78"),
    (
        "shorter",
        lambda item: [msgspec.structs.replace(item, ranges=[(2, 1)], grid=())],
        "rows of item 0100000000000000",
    ),
    ("overlap", lambda item: [item, item], "must be in ascending order"),
    ("outside", lambda item: [msgspec.structs.replace(item, ranges=[(2, 500)])], "(got 500 from 2 on)"),
    ("grid", lambda item: [msgspec.structs.replace(item, grid=(1, 2, 6))], "cannot have the grid (1, 2, 6)"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_step_without_the_rows_of_its_items_is_refused(
    change: Callable[[InputItem], list[InputItem]], message: str, qwen: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = qwen
    engine = ItemRunner(folder)
    prompt = Prompt([[5, 6], make_picture(model, "qwen3_vl", 90, 40), [9]])
    engine.encode_all(tmp_path, prompt)
    prompt.items = change(prompt.items[0])
    with pytest.raises(StepRefused, match=message.replace("(", r"\(").replace(")", r"\)")):
        engine.generate([prompt], 1)
    assert not engine.runner.batch.num_rows
    engine.encoder.close()


def test_text_model_refuses_items(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> None:
    engine = ItemRunner(checkpoint_factory("llama")[0], encoder_cache_tokens=0)
    prompt = Prompt([[5, 6, 7]])
    prompt.items.append(InputItem(b"\1", [(1, 1)], ""))
    with pytest.raises(StepRefused, match="this engine takes none"):
        engine.generate([prompt], 1)


def test_encoder_cache_and_tower_are_in_the_memory_plan(qwen: tuple[Path, Any]) -> None:
    small, large, none = (ItemRunner(qwen[0], encoder_cache_tokens=rows).ready.plan for rows in (5000, 6000, 0))
    assert large.images - small.images == 1000 * 3 * HIDDEN * 4
    assert small.weights > none.weights and none.images == 0


def test_tower_without_a_tensor(qwen: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text((qwen[0] / "config.json").read_text())
    tensors = load_file(qwen[0] / "model.safetensors")
    lost = next(name for name in tensors if name.startswith("model.visual.blocks"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"tensor {lost} is missing"):
        ItemRunner(tmp_path)
