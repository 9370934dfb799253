"""The fake model of a simulated worker: its tokens and their log probabilities."""

from collections.abc import Callable
from math import exp, log1p

from fake_worker import Chunk, FakeWorker, Row, extend_context, logprob_rows
from side_parts import with_rows

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


class SlotModel(FakeWorker):
    """The fake model; requests in ``even`` get the even token at or below the token that they would get otherwise.

    ``logprobs_of``: request id → number of most likely tokens requested, or None for no log probabilities.
    """

    even: frozenset[str] = frozenset()
    logprobs_of: Callable[[str], int | None]

    def _answer(self, row: Row, index: int, context: int) -> int:
        token = super()._answer(row, index, context)
        return token & ~1 if row.request_id in self.even else token

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
        return with_rows(result, LOGPROBS, self._logprobs(answered))  # type: ignore[no-any-return]

    def _logprobs(self, answered: list[tuple[Chunk, list[tuple[int, int]]]]) -> list[SideRows]:
        parts: list[tuple[int, int, Rows]] = []
        for chunk, answers in answered:
            wanted = self.logprobs_of(chunk.row.request_id)
            if wanted is not None and answers:
                best = [best_two(token, context, self.vocab_size) for context, token in answers]
                parts.append((chunk.row.handle, 0, logprob_rows([[each[0], *each[:wanted]] for each in best])))
        return SideRows.of(LOGPROBS, parts)
