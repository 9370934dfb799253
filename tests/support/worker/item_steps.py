"""Drives a model runner with items: encodings through the worker's thread, and requests that have their rows."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
from vision_checkpoints import Prompt

from quire.protocol.config import EngineConfig
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.model.model_config import load_model_config
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.item_messages import Encode, Encoded, InputItem
from quire.protocol.wire.worker_messages import NewRequestData, SchedulerOutput
from quire.worker_proc.images.encoder import ItemEncoder
from quire.worker_proc.parallel.group import TensorParallel
from quire.worker_proc.startup.setup import make_runner

BLOCK_SIZE = 4
BLOCKS = 40
"""Blocks of a request, the same for the same place in the batch: what an earlier request computed is there."""


MOST_GROUPS = 4


class ItemRunner:
    def __init__(self, folder: Path, *, group: TensorParallel | None = None, **settings: Any) -> None:
        model = with_stored_format(folder, stored_tensors(folder), load_model_config(folder))
        defaults = {
            "model": model,
            "model_path": str(folder),
            "dtype": "float32",
            "max_model_len": BLOCK_SIZE * BLOCKS,
            "max_num_seqs": 4,
            "block_size": BLOCK_SIZE,
            "num_blocks_override": 4 * MOST_GROUPS * BLOCKS,
            "encoder_cache_tokens": 256,
            "enable_prompt_embeds": True,
        }
        config = msgspec.convert(defaults | settings, EngineConfig, from_attributes=True)
        layout = kv_layout(model, BLOCK_SIZE, config.kv_cache_dtype)
        self._groups = len(layout.groups)
        self.runner, self.ready = make_runner(config, layout, group=group)
        self.woken = Event()
        self.encoder = ItemEncoder(self.runner.items, self.runner.forward.model, self.woken.set)
        self.steps = self.handle = 0
        self.held: list[int] = []
        self._sampling: list[int] = []

    def encode(self, path: Path, item: InputItem, **fields: Any) -> Encoded:
        """Encode an item, and return the answer."""
        self.encoder.submit(Encode(msgspec.structs.replace(item, path=str(path)), **fields))
        for _ in range(100):
            self.woken.wait(0.1)
            self.woken.clear()
            if answers := self.encoder.take_answers():
                (answer,) = answers
                return answer
        raise AssertionError("no answer to Encode")

    def encode_all(self, folder: Path, prompt: Prompt) -> None:
        """Encode the pictures of a prompt."""
        for item, picture in zip(prompt.items, prompt.pictures, strict=True):
            path = picture.save(folder / f"picture{item.key.hex()}.safetensors")
            answer = self.encode(path, item)
            assert not answer.problem, answer.problem

    def step(self, **fields: Any) -> Any:
        self.steps += 1
        result = self.runner.execute(SchedulerOutput(self.steps, **fields)).result()
        self.runner.check()
        return result

    def _whole(self, prompt: Prompt, begin: int, count: int) -> int:
        """Return the size of a chunk that ends inside no image whose tokens attend in both directions."""
        vision = self.runner.forward.model.config.vision
        if vision is None or vision.is_causal:
            return count
        ends = [first + rows for item in prompt.items for first, rows in item.ranges if first < begin + count]
        return max([count, *(end - begin for end in ends)])

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_tokens: int,
        *,
        chunk: int = 1000,
        computed: int = 0,
        outputs: Sequence[list[int]] = ((), ()),
    ) -> list[list[int]]:
        """Return the greedy answers of prompts that begin in one step; each is computed in chunks.

        Args:
            computed: positions of each whose KV an earlier request at its place has computed.
            outputs: tokens that each has sampled before it was preempted.
        """
        removed, first = self.held, self.handle
        known = [prompt.ids + list(output) for prompt, output in zip(prompts, outputs, strict=False)]
        answers = [list(output) for output, _ in zip(outputs, prompts, strict=False)]
        self.held = list(range(first, first + len(prompts)))
        self.handle += len(prompts)
        params = SamplingParams(temperature=0.0)
        new = [
            NewRequestData(
                first + at,
                f"r{at}",
                len(prompt.ids),
                len(ids),
                computed,
                [BLOCKS] * self._groups,
                params,
                7,
                items=prompt.items,
            )
            for at, (prompt, ids) in enumerate(zip(prompts, known, strict=True))
        ]
        fields: dict[str, Any] = {
            "removed": removed,
            "new_requests": new,
            "token_ids": np.concatenate([np.array(ids, np.int32) for ids in known]),
            "block_ids": np.arange(1, 1 + len(prompts) * self._groups * BLOCKS, dtype=np.int32),
        }
        left = {first + at: len(ids) - computed for at, ids in enumerate(known)}
        while min(map(len, answers)) < num_tokens:
            counts = {
                handle: self._whole(prompts[handle - first], len(known[handle - first]) - rest, min(chunk, rest))
                for handle, rest in left.items()
                if rest
            }
            result = self.step(**fields, counts=[(handle, count) for handle, count in counts.items() if count != 1])
            left = {handle: rest - counts.get(handle, 0) for handle, rest in left.items()}
            if result.handles is not None:
                self._sampling = result.handles.tolist()
            for handle, token in zip(self._sampling, [] if result.tokens is None else result.tokens, strict=False):
                answers[handle - first].append(int(token))
            fields = {}
        return [answer[:num_tokens] for answer in answers]
