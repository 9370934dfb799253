"""A course of requests, which engines with any cache, chunks, drafts and faults must answer alike."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from inprocess import InProcessEngine

from quire.protocol.model.model_config import ModelConfig

NUM_TOKENS = 16
BLOCK_SIZE = 16
MAX_MODEL_LEN = 256
VOCAB = range(3, 97)

CHUNKS, EVENTS = (24, 64, 512), ("preemption", "fork", "kill")


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCAB) for _ in range(length)]


SHARED = _text(0, 130)
PROMPTS = {"long": SHARED + _text(1, 6), **{f"short {n}": _text(2 + n, 27 + n) for n in range(3)}}
PROMPTS["branch"] = SHARED + _text(9, 55)
"""The branch begins with 128 tokens of ``long``, which end at a checkpoint, and its answer passes the next one."""
APPENDED = _text(10, 11)


@dataclass(frozen=True)
class Cell:
    """How an engine computes: ``drafts``: it guesses, in part rightly. ``event``: one of EVENTS."""

    caching: bool
    chunk: int
    event: str
    drafts: bool

    def __str__(self) -> str:
        return f"{self.event}-{self.chunk}{'-cache' * self.caching}{'-drafts' * self.drafts}"


CELLS = [Cell(c, n, e, d) for e in EVENTS for n in CHUNKS for c in (True, False) for d in (False, True)]


@dataclass
class Expected:
    """Transformers' greedy tokens, each computed once."""

    model: Any
    _found: dict[tuple[int | None, ...], list[int]] = field(default_factory=dict)

    def tokens(self, known: list[int], count: int = NUM_TOKENS, banned: int | None = None) -> list[int]:
        """Return ``count`` tokens after the known ones, none of which is ``banned``."""
        key = (banned, *known)
        if len(self._found.get(key, ())) < count:
            ids = torch.tensor([known])
            lengths = {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
            given = lengths | {"do_sample": False, "suppress_tokens": None if banned is None else [banned]}
            with torch.inference_mode():
                out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **given)
            self._found[key] = out[0, len(known) :].tolist()
        return self._found[key][:count]


@dataclass(frozen=True)
class Asked:
    """A request. ``output``: tokens of its answer that are known before. ``banned``: a token that it may not choose."""

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    banned: int | None = None


class Course:
    """The requests of one engine, and what it answers.

    Attributes:
        asked: by name.
    """

    def __init__(self, folder: Path, model: ModelConfig, expected: Expected, cell: Cell, **settings: Any) -> None:
        given: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
        given |= {"enable_prefix_caching": cell.caching, "max_num_batched_tokens": cell.chunk}
        given |= {"num_blocks_override": 200, "async_scheduling": cell.event != "fork"}
        if cell.drafts:
            speculative = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
            given |= {"num_speculative_tokens": 2, "speculative": speculative}
        self.cell, self.asked = cell, dict[str, Asked]()
        self.engine = InProcessEngine(folder, model=model, **(given | settings))
        self._expected = expected
        if cell.drafts:
            propose_continuations(self.engine, self._texts)

    def play(self) -> None:
        """Ask all requests, with the cell's event in the middle of their answers."""
        for name in ("long", "short 0", "short 1", "short 2"):
            self.ask(name, Asked(tuple(PROMPTS[name])))
            if name == "short 0" and self.cell.event == "fork":
                self._fork(name)  # both go on from the prompt's last token
        self._until("long", 1)
        self.ask("branch", Asked(tuple(PROMPTS["branch"])))
        self._until("long", 4)
        if self.cell.event == "fork":
            self._fork("long")
            self._fork("short 1")
        self._until("branch", 3)
        if self.cell.event == "kill":
            lose_workers(self.engine)
        self.engine.run()
        self.ask("turn two", Asked((*PROMPTS["branch"], *self.engine.answers["branch"].tokens, *APPENDED)))
        self.engine.run()

    def ask(self, name: str, asked: Asked, parent: str = "") -> None:
        """Add a request. ``parent``: the one from which it is forked after its known tokens."""
        self.asked[name] = asked
        prompt, output = list(asked.prompt), list(asked.output)
        given: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 0}
        if asked.banned is not None:
            given["logit_bias"] = {asked.banned: -100.0}
        if parent:
            self.engine.add(name, [], forked_from=(parent, len(prompt + output)), **given)
        else:
            self.engine.add(name, prompt, output or None, **given)

    def wanted(self, name: str) -> list[int]:
        """Return transformers' tokens of a request's answer, without those that were known."""
        asked = self.asked[name]
        known = [*asked.prompt, *asked.output]
        return self._expected.tokens(known, NUM_TOKENS - len(asked.output), asked.banned)

    def answer(self, name: str) -> tuple[list[int], list[bytes]]:
        found = self.engine.answers[name]
        return found.tokens, found.logprobs

    def _until(self, name: str, count: int) -> None:
        while len(self.engine.answers[name].tokens) < count:
            assert self.engine.answers[name].rejected is None, self.engine.answers[name].rejected
            self.engine.step()

    def _fork(self, parent: str) -> None:
        """Fork a request after all its tokens. The child may not choose its parent's next one."""
        prompt, answer = PROMPTS[parent], self.engine.answers[parent].tokens
        banned = self._expected.tokens(prompt + answer, 1)[0]
        self.ask(f"child of {parent}", Asked(tuple(prompt), tuple(answer), banned), parent)

    def _texts(self) -> Iterator[list[int]]:
        for name, asked in self.asked.items():
            yield [*asked.prompt, *asked.output, *self.wanted(name)]


def propose_continuations(engine: InProcessEngine, texts: Callable[[], Iterable[list[int]]]) -> None:
    """Propose how a known text continues, and at some lengths something else: small random models repeat nothing."""
    batch = engine.runner.batch

    def propose(wanted: dict[int, int]) -> dict[int, list[int]]:
        found = {}
        for row, count in wanted.items():
            known = batch.tokens.data[row, : batch.num_known[row]].tolist()
            text = next((text for text in texts() if text[: len(known)] == known), known)
            found[row] = text[len(known) :][:count]
            for every, place in ((3, 1), (5, 0)):
                if len(known) % every == 0 and len(found[row]) > place:
                    found[row][place] = (found[row][place] + 1) % 97
        return found

    engine.runner._proposer.propose = propose  # type: ignore[union-attr, method-assign, assignment]


def lose_workers(engine: InProcessEngine) -> None:
    """Begin a new epoch of workers, which have none of the old ones' states."""
    engine.scheduler.begin_worker_epoch(new_workers=True)
    while engine.to_scheduler.receive() is not None:  # steps that died with the workers
        pass
    engine.runner.begin_worker_epoch(engine.scheduler.last_step)
    states = engine.runner.states.pool
    for tensor in [] if states is None else states.tensors:
        tensor.fill_(torch.nan)
