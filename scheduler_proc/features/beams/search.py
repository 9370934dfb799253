"""Beam search over the log probabilities of a step: which beams continue with which tokens, and which outputs end.

The rules are those of ``GenerationMixin.generate`` of transformers with ``num_beams``, so that both return the same
outputs. Scores are normalised by length as there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.front_end_messages import EndReason, Hypothesis

Candidates = Sequence[tuple[int, float]]
"""(token id, log probability) of the most likely tokens after a beam, in descending order."""


@dataclass(frozen=True, slots=True)
class BeamChoice:
    """The next beams: beam i continues beam ``parents[i]`` with ``tokens[i]``. The best one is first."""

    parents: list[int]
    tokens: list[int]


class BeamSearch:
    """One search. ``step`` gets the candidates of all beams, in order, and chooses.

    An output ends with a stop token or at the length limit, if it is among the ``beam_width`` best continuations of
    its step. The best ``beam_width`` outputs that ended are kept.
    """

    def __init__(self, params: SamplingParams, stop_tokens: frozenset[int], max_output_tokens: int) -> None:
        assert params.beam_width is not None
        self._width = params.beam_width
        self._params = params
        self._has_grammar = params.structured_outputs is not None
        self._stop_tokens = stop_tokens
        self._most = max_output_tokens
        self._logprobs = [0.0]
        """The sum of the log probabilities of each beam's output so far."""
        self._choices: list[BeamChoice] = []
        self.ended: list[Hypothesis] = []
        """The best first; complete when ``step`` has returned None."""

    def step(self, candidates: Sequence[Candidates]) -> BeamChoice | None:
        """Choose the next beams; return None when the search has ended.

        Args:
            candidates: those of each beam; the tokens that constraints exclude have a log probability of -inf.
        """
        length = len(self._choices) + 1
        found = [
            (so_far + logprob, parent, token)
            for parent, (so_far, own) in enumerate(zip(self._logprobs, candidates, strict=True))
            for token, logprob in own
            if logprob > -math.inf
        ]
        found.sort(key=lambda each: -each[0])  # stable: of equal ones the earlier beam's more likely token is first
        kept: list[tuple[float, int, int]] = []
        for rank, (logprob, parent, token) in enumerate(found):
            stops = token in self._stop_tokens and (length > self._params.min_tokens or self._has_grammar)
            if not stops and length < self._most:
                kept.append((logprob, parent, token))
            elif rank < self._width:
                self._end(logprob, self._output(parent, token), stops=stops)
            if len(kept) == self._width and rank + 1 >= self._width:
                break
        self.ended = sorted(self.ended, key=lambda each: -each.score)[: self._width]
        if not kept or self._is_done(length, kept[0][0]):
            return None
        self._logprobs = [logprob for logprob, _, _ in kept]
        self._choices.append(BeamChoice([parent for _, parent, _ in kept], [token for _, _, token in kept]))
        return self._choices[-1]

    def _output(self, beam: int, token: int) -> list[int]:
        """Return the output of a beam, and ``token``."""
        backwards = [token]
        for choice in reversed(self._choices):
            backwards.append(choice.tokens[beam])
            beam = choice.parents[beam]
        return backwards[::-1]

    def _end(self, logprob: float, tokens: list[int], *, stops: bool) -> None:
        reason = EndReason.STOPPED if stops else EndReason.LENGTH
        own = stops and tokens[-1] in self._params.stop_token_ids
        score = self._score(logprob, len(tokens))
        self.ended.append(Hypothesis(tokens, score, logprob, int(reason), tokens[-1] if own else None))

    def _score(self, logprob: float, length: int) -> float:
        return logprob / float(length**self._params.length_penalty)

    def _is_done(self, length: int, best: float) -> bool:
        """Whether no beam can replace an output that has ended. ``best``: the log probability of the best beam."""
        if len(self.ended) < self._width:
            return False
        if self._params.early_stopping is True:
            return True
        if self._params.early_stopping == "never" and self._params.length_penalty > 0:
            length = self._most
        return self._score(best, length) <= self.ended[-1].score
