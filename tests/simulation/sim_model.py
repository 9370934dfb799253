"""The fake model of a simulated worker: its tokens and their log probabilities."""

from collections.abc import Callable
from math import exp, inf, log1p

from fake_worker import Chunk, FakeWorker, Row, candidates_after, client_id, extend_context, logprob_rows
from side_parts import parts_of, with_rows
from sim_settings import VOCAB_SIZE

from quire.protocol.wire.side_rows import LOGPROBS, Rows, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput

GRAMMAR_STEP = 2
"""The runner-up of an even token is even, so a grammar that allows one allows both."""


def gap(context: int) -> float:
    """Return the distance in nats between the token after ``context`` and its runner-up."""
    return 1.0 + context % 7


def best_two(token: int, context: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return the token after ``context`` and its runner-up with their log probabilities; all other tokens have none."""
    both = log1p(exp(-gap(context)))
    return [(token, -both), ((token + GRAMMAR_STEP) % vocab_size, -gap(context) - both)]


def candidates_of(context: int, count: int, *, even: bool) -> list[tuple[int, float]]:
    """Return the most likely tokens after ``context``, or the most likely even ones and one that is excluded."""
    if not even:
        return candidates_after(context, count, VOCAB_SIZE)
    found = candidates_after(context, 10 * count, VOCAB_SIZE)
    return [*[each for each in found if not each[0] % 2][: count - 1], (1, -inf)]


class SlotModel(FakeWorker):
    """The fake model; requests in ``even`` get the even token at or below the token that they would get otherwise.

    ``logprobs_of``: request id → number of most likely tokens requested, or None for no log probabilities.
    """

    even: frozenset[str] = frozenset()
    logprobs_of: Callable[[str], int | None]

    def _answer(self, row: Row, index: int, context: int) -> int:
        token = super()._answer(row, index, context)
        return token & ~1 if client_id(row.request_id) in self.even else token

    def candidates(self, row: Row, context: int) -> list[tuple[int, float]]:
        return candidates_of(context, row.num_candidates, even=client_id(row.request_id) in self.even)

    def answers(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Return (context, token) of each token that the chunk will give; call before ``finish``."""
        if not chunk.samples:
            return []
        row, context = chunk.row, chunk.row.contexts[-1]
        pairs = []
        for token in chunk.drafts[: chunk.num_accepted]:
            pairs.append((context, token))
            context = extend_context(context, token)
        return [*pairs, (context, self._answer(row, len(row.tokens) + chunk.num_accepted, context))]

    def finish(self, chunks: list[Chunk]) -> ModelRunnerOutput:
        answered = [(chunk, self.answers(chunk)) for chunk in chunks]
        result = super().finish(chunks)
        beams = [part for part in parts_of(result, LOGPROBS) if self.rows[part[0]].is_search]
        return with_rows(result, LOGPROBS, self._logprobs(answered, beams))  # type: ignore[no-any-return]

    def _logprobs(
        self, answered: list[tuple[Chunk, list[tuple[int, int]]]], parts: list[tuple[int, int, Rows]]
    ) -> list[SideRows]:
        """Return ``parts`` and those of requests with log probabilities."""
        for chunk, answers in answered:
            wanted = self.logprobs_of(client_id(chunk.row.request_id))
            if wanted is not None and answers:
                best = [best_two(token, context, self.vocab_size) for context, token in answers]
                parts.append((chunk.row.handle, 0, logprob_rows([[each[0], *each[:wanted]] for each in best])))
        return SideRows.of(LOGPROBS, parts)
