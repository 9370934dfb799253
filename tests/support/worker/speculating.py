"""Engines with and without drafts over the same prompts, and a draft model that is right about half the time."""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from checkpoints import make_checkpoint
from inprocess import Answer, InProcessEngine

from quire.protocol.config import SpeculativeConfig
from quire.protocol.model.model_config import load_model_config

METHODS = ("ngram", "suffix", "draft_model")
Prompts = list[tuple[list[int], dict[str, Any]]]
"""Token ids, and the sampling parameters of the request."""


@dataclass
class Ran:
    """Outputs of an engine, and its statistics."""

    answers: list[Answer]
    engine: InProcessEngine

    @property
    def tokens(self) -> list[list[int]]:
        return [answer.tokens for answer in self.answers]

    @property
    def endings(self) -> list[tuple[Any, ...]]:
        """The final message to each client."""
        ends = [answer.ended for answer in self.answers]
        return [(end.reason, end.stop_reason, end.num_output_tokens) if end is not None else () for end in ends]

    @property
    def logprobs(self) -> "list[np.ndarray[Any, np.dtype[np.float32]]]":
        """Per request, the log probabilities of all its tokens."""
        return [np.frombuffer(b"".join(answer.logprobs), np.float32) for answer in self.answers]

    @property
    def num_accepted(self) -> int:
        return self.engine.statistics().num_accepted_tokens


class Speculating:
    """Make a model, and a draft model that differs from it only by a little noise on its weights."""

    def __init__(self, folder: Path, family: str, noise: float = 0.05, **overrides: Any) -> None:
        import torch

        self.folder, self.draft_folder = folder / "model", folder / "draft"
        self._plain: dict[str, Ran] = {}
        model = make_checkpoint(self.folder, family, **overrides)
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for weight in model.parameters():
                deviation = noise * float(weight.std() if weight.numel() > 1 else 1.0)
                weight.add_(torch.empty(weight.shape).normal_(0.0, deviation, generator=generator))
        model.save_pretrained(self.draft_folder)

    def config(self, method: str, **settings: Any) -> SpeculativeConfig:
        chosen: dict[str, Any] = {"method": method, "adaptive": False}
        if method == "draft_model":
            chosen |= {"model": load_model_config(self.draft_folder), "model_path": str(self.draft_folder)}
        if method == "ngram":
            chosen |= {"prompt_lookup_min": 1}
        return SpeculativeConfig(**(chosen | settings))

    def run(
        self, prompts: Prompts, method: str | None = None, speculative: dict[str, Any] | None = None, **settings: Any
    ) -> Ran:
        """Answer all prompts, admitted as rows become free; ``method`` None: without drafts."""
        if method is not None:
            settings = {
                "num_speculative_tokens": 4,
                "speculative": self.config(method, **(speculative or {})),
                **settings,
            }
        engine = InProcessEngine(self.folder, **{"max_num_seqs": 8, "num_blocks_override": 128, **settings})
        for index, (prompt, sampling) in enumerate(prompts):
            engine.add(str(index), prompt, **sampling)
        answers = engine.run()
        return Ran([answers[str(index)] for index in range(len(prompts))], engine)

    def plain(self, prompts: Prompts, **settings: Any) -> Ran:
        """``run`` without drafts; the same prompts are answered once."""
        key = repr((prompts, settings))
        if key not in self._plain:
            self._plain[key] = self.run(prompts, **settings)
        return self._plain[key]


def random_prompts(count: int, max_tokens: int, *, longest: int = 24, seed: int = 0, **sampling: Any) -> Prompts:
    """Return sampling parameters: every second request is greedy; the others use temperature alone, top-k or top-p in
    turn."""
    random = Random(seed)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {}, {"top_k": 9}, {}, {"top_p": 0.8, "min_p": 0.02}]
    prompts: Prompts = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        own = {"temperature": 0.9} | kind if kind else {}
        tokens = [random.randrange(3, 97) for _ in range(random.randrange(1, longest + 1))]
        prompts.append((tokens, {"max_tokens": max_tokens, "seed": index} | own | sampling))
    return prompts
