"""A model runner without a model: rows without tensors, and pseudorandom tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.protocol.config import EngineConfig
from quire.protocol.wire.arrays import Int32
from quire.protocol.wire.side_rows import LOGPROBS, PROMPT_LOGPROBS, Rows, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput, NewRequestData, SampleInputs, SchedulerOutput
from quire.replay.costs.rows import SimulatedRows
from quire.replay.run.step_shape import StepShape
from quire.replay.simulate.simulated_side_rows import SimulatedSideRows

_UInt64 = npt.NDArray[np.uint64]


@dataclass(slots=True)
class SimulatedStep:
    """A step whose rows have advanced and whose result is not made yet.

    Attributes:
        handles, tokens: int32 ``[n]``: the sampling requests and their tokens before any grammar mask.
        send_handles: the result must contain ``handles``.
        side: what the result has beside tokens, without their log probabilities.
    """

    step: int
    awaits_sample_inputs: bool
    shape: StepShape
    handles: Int32
    tokens: Int32
    send_handles: bool
    side: list[SideRows]


@dataclass(slots=True)
class _Prompt:
    """A prompt whose log probabilities were requested and are not complete yet."""

    token_ids: Int32
    num_computed: int
    num_best: int
    active: bool = True


class _Columns(NamedTuple):
    """Inputs of sampling by handle; each ``[capacity]``.

    Attributes:
        seeds: uint64, the request's seed.
        positions: int64, position of the next sampled token.
        first_end: int64, first position at which an end token is allowed (``min_tokens``).
    """

    seeds: _UInt64
    positions: npt.NDArray[np.int64]
    first_end: npt.NDArray[np.int64]

    @classmethod
    def of(cls, capacity: int) -> "_Columns":
        return cls(np.zeros(capacity, np.uint64), np.zeros(capacity, np.int64), np.zeros(capacity, np.int64))

    def grown(self) -> "_Columns":
        return _Columns(*(np.concatenate([column, np.zeros_like(column)]) for column in self))


@dataclass(slots=True)
class _RowOptions:
    """Rows with token constraints or log probabilities, by handle."""

    allowed: dict[int, Int32] = field(default_factory=dict)
    num_logprobs: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, _Prompt] = field(default_factory=dict)

    def forget(self, handle: int) -> None:
        self.allowed.pop(handle, None)
        self.num_logprobs.pop(handle, None)
        self.prompts.pop(handle, None)


class SimulatedRunner:
    """Applies diffs and samples like a worker's model runner, in time almost independent of the model.

    A token is a function of its request's seed and its position. It is never an end token or a thinking marker, unless
    a grammar allows an end token: then the output ends as soon as possible. Allowed token lists and grammars are
    respected; temperature, penalties and biases are ignored.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._vocab_size = config.model.vocab_size
        self._ends = np.array(config.model.eos_token_ids, np.int64)
        markers = [*config.thinking_start_token_ids, *config.thinking_end_token_ids]
        default_tokens = np.setdiff1d(np.arange(self._vocab_size, dtype=np.int32), [*self._ends.tolist(), *markers])
        self._default_tokens = default_tokens if len(default_tokens) else np.arange(self._vocab_size, dtype=np.int32)
        self._rows = SimulatedRows()
        self._columns = _Columns.of(256)
        self._options = _RowOptions()
        self._side_rows = SimulatedSideRows(config.model)
        self._handles = np.zeros(0, np.int32)

    def launch(self, diff: SchedulerOutput) -> SimulatedStep:
        """Apply one step's diff to the rows and sample its tokens."""
        for handle in diff.removed:
            self._options.forget(handle)
            self._side_rows.forget(handle)
        at, forked = 0, {handle for handle, _ in diff.forks}
        for new in diff.new_requests:
            assert diff.token_ids is not None
            token_ids = diff.token_ids[at : at + new.num_tokens]
            self._add(new, token_ids)
            self._side_rows.add(new, token_ids, is_forked=new.handle in forked)
            at += new.num_tokens
        # Before the rows advance: the counts of this diff are added to what was computed until now.
        side = self._prompt_logprobs(diff) if self._options.prompts else []
        side += self._side_rows.compute(diff) if self._side_rows else []
        shape = self._rows.apply(diff)
        changed = self._rows.take_handles()
        if changed is not None:
            self._handles = changed
        # As a worker does, so that a recorded simulated run has the same messages.
        send = changed is not None or bool(diff.removed or diff.new_requests)
        awaits, tokens = diff.awaits_sample_inputs, self._sample(self._handles)
        return SimulatedStep(diff.step, awaits, shape, self._handles, tokens, send, side)

    def finish(self, launched: SimulatedStep, inputs: SampleInputs | None, seconds: float) -> ModelRunnerOutput:
        """Return the step's result; ``inputs`` is None if the step awaits none."""
        failed = [] if inputs is None else self._constrain(launched, inputs)
        return ModelRunnerOutput(
            launched.step,
            tokens=launched.tokens if len(launched.tokens) else None,
            handles=launched.handles if launched.send_handles else None,
            seconds=seconds,
            failed=failed,
            side=launched.side + (self._logprobs(launched) if self._options.num_logprobs else []),
        )

    # ---- rows

    def _add(self, new: NewRequestData, token_ids: Int32) -> None:
        handle, sampling = new.handle, new.sampling
        while handle >= len(self._columns.seeds):
            self._columns = self._columns.grown()
        # A token depends on the seed and the position only, so that recoveries and preemptions give the same text, and
        # tests can tell a lost token from another one.
        self._columns.seeds[handle] = new.seed % 2**64
        self._columns.positions[handle] = new.num_tokens
        self._columns.first_end[handle] = new.num_prompt_tokens + sampling.min_tokens
        if sampling.allowed_token_ids is not None:
            self._options.allowed[handle] = np.array(sampling.allowed_token_ids, np.int32)
        if sampling.num_candidates is not None and not sampling.use_beam_search:
            self._options.num_logprobs[handle] = min(sampling.num_candidates, self._vocab_size)
        if sampling.prompt_logprobs is not None:
            num_best = min(sampling.prompt_logprobs, self._vocab_size)
            prompt = token_ids[: new.num_prompt_tokens].copy()
            self._options.prompts[handle] = _Prompt(prompt, new.num_computed_tokens, num_best)

    # ---- tokens

    def _sample(self, handles: Int32) -> Int32:
        """Return int32 ``[n]``, the next token of each of ``handles``, and advance their positions."""
        noise = _noise(self._columns.seeds[handles], self._columns.positions[handles])
        tokens: Int32 = self._default_tokens[noise % np.uint64(len(self._default_tokens))]
        if self._options.allowed:
            for index, handle in enumerate(handles.tolist()):
                allowed = self._options.allowed.get(handle)
                if allowed is not None:
                    tokens[index] = allowed[int(noise[index]) % len(allowed)]
        self._columns.positions[handles] += 1
        return tokens

    def _constrain(self, launched: SimulatedStep, inputs: SampleInputs) -> list[tuple[int, str]]:
        """Replace the tokens of rows that have a grammar mask; return (handle, reason) of rows without a token."""
        if inputs.bitmask is None:
            return []
        masks = inputs.bitmask.reshape(sum(inputs.counts), -1).view(np.uint8)
        index_of = {handle: index for index, handle in enumerate(launched.handles.tolist())}
        failed, first = [], 0
        for handle, count in zip(inputs.handles, inputs.counts, strict=True):
            mask = masks[first]
            first += count
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: self._vocab_size])
            if handle in index_of:
                token = self._choose(handle, allowed)
                launched.tokens[index_of[handle]] = max(token, 0)
                if token < 0:
                    failed.append((handle, "no token is allowed"))
        return failed

    def _choose(self, handle: int, allowed: npt.NDArray[np.int64]) -> int:
        """Return one of the ``allowed`` tokens for the position just sampled; -1 if none is allowed."""
        position = self._columns.positions[handle] - 1
        ends = np.isin(allowed, self._ends)
        allowed = allowed[ends] if ends.any() and position >= self._columns.first_end[handle] else allowed[~ends]
        own = self._options.allowed.get(handle)
        if own is not None:
            allowed = np.intersect1d(allowed, own)
        if not len(allowed):
            return -1
        noise = _noise(self._columns.seeds[[handle]], np.array([position]))
        return int(allowed[int(noise[0]) % len(allowed)])

    # ---- log probabilities

    def _logprobs(self, launched: SimulatedStep) -> list[SideRows]:
        """Return the log probabilities of the rows that requested them."""
        wanted, sampled = self._options.num_logprobs, zip(launched.handles.tolist(), launched.tokens, strict=True)
        parts = [(handle, 0, self._best(np.array([t]), wanted[handle])) for handle, t in sampled if handle in wanted]
        return SideRows.of(LOGPROBS, parts)

    def _prompt_logprobs(self, diff: SchedulerOutput) -> list[SideRows]:
        """Return the log probabilities of the prompt tokens of this step. Call it before the diff is applied."""
        counts = dict(diff.counts)
        for handle, prompt in self._options.prompts.items():
            prompt.active = (prompt.active or handle in diff.unparked) and handle not in diff.parked
        parts = [
            (handle, start, self._best(prompt.token_ids[start:end], prompt.num_best))
            for handle, prompt, start, end in self._prompt_parts(counts)
        ]
        return SideRows.of(PROMPT_LOGPROBS, parts)

    def _prompt_parts(self, counts: dict[int, int]) -> Iterator[tuple[int, _Prompt, int, int]]:
        """Yield (handle, prompt, start, end) of prompt tokens whose predecessors are computed in this step."""
        for handle, prompt in list(self._options.prompts.items()):
            if not prompt.active:
                continue
            start = prompt.num_computed + 1
            prompt.num_computed += counts.get(handle, 1)
            end = min(prompt.num_computed + 1, len(prompt.token_ids))
            if end == len(prompt.token_ids):
                del self._options.prompts[handle]
            if end > start:
                yield handle, prompt, start, end

    def _best(self, tokens: Int32, num_best: int) -> Rows:
        """Return ids, ranks and log probabilities: 1/2 for the given token, then 1/2, 1/4, ... for its successors."""
        others = (tokens[:, None].astype(np.int64) + np.arange(num_best)) % self._vocab_size
        ids = np.concatenate([tokens[:, None], others], axis=1, dtype=np.int32, casting="unsafe")
        falling = (np.log(0.5) * np.array([1, *range(1, num_best + 1)])).astype(np.float32)
        return [ids, np.ones((len(tokens), 1), np.int32), np.tile(falling, (len(tokens), 1))]


def _noise(seeds: _UInt64, positions: npt.NDArray[np.int64] | Sequence[int]) -> _UInt64:
    """Return uint64 ``[n]`` of pseudorandom bits: the finaliser of SplitMix64 (Steele et al., 2014)."""
    bits = seeds + np.asarray(positions).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: _UInt64 = bits ^ (bits >> np.uint64(31))
    return result
