"""Random requests with every feature, and a batch of them that changes as real batches do."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sampling_batch import CPU, sampling_config

from quire.protocol.config import EngineConfig
from quire.protocol.request.logits_processors import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
)
from quire.protocol.request.sampling_params import SamplingParams

VOCAB = 12
EOS, START, END = 3, [1], [7, 8]


def processor_config(**settings: Any) -> EngineConfig:
    markers = {"thinking_start_token_ids": START, "thinking_end_token_ids": END}
    return sampling_config(VOCAB, **{"eos": [EOS], "max_num_seqs": 8, **markers, **settings})


def random_tokens(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Return sampling parameters that have each feature with a probability of about one half."""
    features: dict[str, Any] = {
        "logit_bias": {token: rng.uniform(-100, 100) for token in set(random_tokens(rng, 1, 3))},
        "allowed_token_ids": sorted({*random_tokens(rng, 2, 6), 0, 2, 4}),
        "bad_words_token_ids": [random_tokens(rng, 1, 3) for _ in range(rng.randint(1, 6))],
        "min_tokens": rng.randint(1, 8),
        "stop_token_ids": random_tokens(rng, 0, 2),
        "ignore_eos": rng.random() < 0.5,
        "presence_penalty": rng.choice([0.0, 1.5]),
        "frequency_penalty": rng.choice([0.0, -0.75]),
        "repetition_penalty": rng.choice([1.0, 1.5]),
        "thinking_token_budget": rng.randint(0, 4),
        "extra_args": rng.choice([{"add_text": True}, {"prefers": rng.randrange(VOCAB)}]),
    }
    chosen = {name: value for name, value in features.items() if rng.random() < 0.5}
    return {"max_tokens": None, "temperature": rng.choice([0.0, 0.7]), **chosen}


@dataclass(eq=False)
class Request:
    params: SamplingParams
    prompt: list[int]
    output: list[int]


def random_request(rng: random.Random) -> Request:
    prompt = random_tokens(rng, 1, 8)
    if rng.random() < 0.5:
        prompt += START
    return Request(SamplingParams(**random_sampling(rng)), prompt, random_tokens(rng, 0, 4))


def added(rows: Sequence[Request | None]) -> BatchUpdate:
    """Return the update that adds these rows to an empty batch."""
    new = [AddedRequest(row, r.params, r.prompt, r.output) for row, r in enumerate(rows) if r is not None]
    return BatchUpdate(len(rows), [], new, [])


def made(cls: type[LogitsProcessor], rows: Sequence[Request | None], config: EngineConfig | None = None) -> Any:
    """Return a new processor that has received one update, which adds these rows."""
    processor = cls(config or processor_config(), CPU, False)
    processor.update_state(added(rows))
    return processor


def random_logits(rng: random.Random, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


class ChangingBatch:
    """A batch whose rows are added, removed, moved and swapped at random, and whose outputs grow."""

    def __init__(self, rng: random.Random, max_rows: int = 6) -> None:
        self._rng = rng
        self.rows: list[Request | None] = [None] * max_rows

    def change(self) -> BatchUpdate | None:
        """Return the update in the order removed, added, moved; each kind may name any row."""
        rng, rows = self._rng, self.rows
        for request in rows:
            if request is not None:
                request.output += random_tokens(rng, 0, 2)
        if rng.random() < 0.2:
            return None
        removed = sorted((row for row, r in enumerate(rows) if r is not None and rng.random() < 0.3), reverse=True)
        for row in removed:
            rows[row] = None
        new = []
        for row in range(len(rows)):
            if rng.random() < 0.3:
                rows[row] = request = random_request(rng)
                new.append(AddedRequest(row, request.params, request.prompt, request.output))
        gone = [row for row in removed if rows[row] is None]
        moved = []
        for _ in range(rng.randrange(4)):
            source, target = rng.sample(range(len(rows)), 2)
            swap = rng.random() < 0.5
            rows[target], rows[source] = rows[source], rows[target] if swap else None
            direction = MoveDirectionality.SWAP if swap else MoveDirectionality.UNIDIRECTIONAL
            moved.append(MovedRequest(source, target, direction))
        return BatchUpdate(len(rows), gone, new, moved)
