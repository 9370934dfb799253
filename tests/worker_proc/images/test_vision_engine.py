"""Whole engines answer prompts with pictures as transformers does, and encode each picture once."""

from hashlib import sha256
from pathlib import Path

import pytest
from inprocess import InProcessEngine
from tiers import covering
from vision_checkpoints import Prompt, greedy_tokens, make_checkpoint, make_picture

from quire.protocol.wire.item_messages import InputItem

TOKENS = 8
KINDS = ["llava", "gemma3", "smolvlm", "mistral3", "qwen2_5_vl", "qwen3_vl"]
"""Families of which each needs something else of the scheduler or the worker."""


def items_of(prompt: Prompt, folder: Path) -> list[InputItem]:
    found = []
    for item, picture in zip(prompt.items, prompt.pictures, strict=True):
        content = b"".join(tensor.numpy().tobytes() for tensor in picture.tensors.values())
        digest = sha256(content).digest()
        path = picture.save(folder / f"{digest.hex()}.safetensors")
        found.append(InputItem(digest, item.ranges, str(path), "image", item.grid))
    return found


@pytest.mark.parametrize(("name", "budget"), covering(KINDS, [24, 512]))
def test_tokens_through_scheduling(name: str, budget: int, tmp_path: Path) -> None:
    """Prompts that share pictures, in chunks, with preemption, the loss of the worker, and prefix cache hits."""
    model = make_checkpoint(tmp_path, name)
    wide, tall = make_picture(model, name, 90, 40), make_picture(model, name, 30, 70, seed=1)
    prompts = {
        "text": Prompt([[50, 51, 52]]),  # grows, so that those behind it are preempted
        "one": Prompt([[5, 6, 8], wide, [9, 10]]),
        "two": Prompt([[5, 6], tall, [9, 10, 11], wide, [12]]),
        "again": Prompt([[40, 41, 42, 43, 44], wide, [45]]),
    }
    lengths = dict.fromkeys(prompts, TOKENS) | {"text": 4 * TOKENS}
    wanted = {key: greedy_tokens(model, prompt, lengths[key]) for key, prompt in prompts.items()}
    longest = -(-max(len(prompt.ids) for prompt in prompts.values()) // 4) + 2
    engine = InProcessEngine(
        tmp_path,
        block_size=4,
        num_blocks_override=longest * (3 if name == "gemma3" else 1) + 6,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        encoder_cache_tokens=wide.rows + tall.rows,
    )
    for key, prompt in prompts.items():
        engine.add(key, prompt.ids, items=items_of(prompt, tmp_path), max_tokens=lengths[key])
    answers = engine.run()
    # In whole prompts, Gemma 3's windows give blocks back before another one needs them.
    assert engine.statistics().num_preemptions > 0 or (name, budget) == ("gemma3", 512)
    assert {key: answer.tokens for key, answer in answers.items()} == wanted
    assert engine.statistics().num_encoder_runs == 2, "each picture once"
    first = prompts["two"]
    engine.add("cached", first.ids, items=items_of(first, tmp_path), max_tokens=TOKENS)
    engine.step()
    engine.replace_workers()
    engine.run()
    assert engine.answers["cached"].tokens == wanted["two"]
    assert engine.statistics().num_encoder_runs == 4, "the new worker has none"
    engine.add("hit", first.ids, items=items_of(first, tmp_path), max_tokens=TOKENS)
    engine.run()
    assert engine.answers["hit"].tokens == wanted["two"] and engine.answers["hit"].num_cached_tokens > 4
    assert engine.statistics().num_encoder_runs == 4
    assert engine.encoder is not None
    engine.encoder.close()
