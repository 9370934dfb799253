"""One answer in flight: converts the engine's updates to text, up to a stop string or the end of the sequence."""

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from quire.frontend.engine.client import EngineClient
from quire.frontend.engine.kept_updates import KeptUpdates
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.text.prompts import Prompt, check_volume, fit_params, tokenize_bad_words
from quire.frontend.text.text_in import TextIn
from quire.frontend.text.text_out import TextOut
from quire.protocol.request.sampling_params import SamplingParams, seed_for_sample
from quire.protocol.wire.front_end_messages import EndReason, Hypothesis
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs
from quire.protocol.wire.timeline import TimelineEvent

PROMPT_TAIL = 12


@dataclass(slots=True)
class PlacedLogprobs:
    """A token's log probabilities, and the offset of its text in the answer."""

    logprobs: TokenLogprobs
    text_offset: int


class BeamOutput(msgspec.Struct, gc=False):
    """One output of a beam search; ``score`` and ``logprob`` as of Hypothesis.

    ``text`` and ``texts`` as of OutputDelta.
    """

    text: str
    token_ids: list[int]
    score: float
    logprob: float
    finish_reason: str
    stop_reason: int | None
    texts: list[str] | None = None


class OutputDelta(msgspec.Struct, gc=False):
    """The part of an answer that one update adds.

    Attributes:
        finish_reason: stop, length, abort, error or repetition; set only on the last delta.
        stop_reason: the stop string, or the stop token's id, that ended the answer.
        num_output_tokens: output tokens of the answer so far, including this delta.
        detail: the reason, if the finish reason is error.
        admitted: time of the first admission, as ``Update.admitted``.
        prompt_logprobs: on the first delta, if requested: of all prompt tokens but the first.
        beams: the outputs of a beam search, the best first. It has no other delta, and this one no text.
        routed_experts: on the last delta, if requested: of all tokens but the last one, ``[tokens, layers * top_k]``.
        texts: the parts of ``text`` by the tokens that completed them; None for one token, or if there are no thoughts.
        timeline: on the last delta, if requested: what happened to the request.
        has_end_token: the last token ended the answer, and has no text.
    """

    text: str
    token_ids: list[int]
    logprobs: list[PlacedLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_output_tokens: int
    num_cached_tokens: int
    detail: str
    prompt_logprobs: LogprobArrays | None = None
    admitted: float = 0.0
    beams: list[BeamOutput] | None = None
    routed_experts: npt.NDArray[np.uint16] | None = None
    texts: list[str] | None = None
    has_end_token: bool = False
    timeline: list[TimelineEvent] | None = None

    def without_answer(self) -> "OutputDelta":
        """Return the delta for a client that requested no output tokens: the engine's one token is left out."""
        ended = "length" if self.finish_reason in ("stop", "repetition") else self.finish_reason
        timeline = [each for each in self.timeline or () if each.event != "first_token"]
        if ended and timeline:
            timeline[-1] = msgspec.structs.replace(timeline[-1], reason=ended, tokens=0)
        return msgspec.structs.replace(
            self,
            text="",
            token_ids=[],
            logprobs=None if self.logprobs is None else [],
            finish_reason=ended,
            timeline=timeline or None,
            stop_reason=None,
            num_output_tokens=0,
            beams=None,
            texts=None,
            has_end_token=False,
        )


class Answer:
    """One sequence of the engine and its text. The owner calls ``abort`` unless the sequence has ended."""

    __slots__ = (
        "_has_thoughts", "_include_stop_token", "_is_complete", "_new_text_out", "_num_prompt_tokens",
        "_only_engine_ends", "_prompt_logprobs_due", "_routed", "_text_out", "sequence",
    )  # fmt: skip

    def __init__(self, sequence: Stream, text_in: TextIn, prompt: Prompt, params: SamplingParams) -> None:
        self.sequence = sequence
        self._new_text_out = partial(
            TextOut,
            text_in.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prompt_tail=prompt.token_ids[-PROMPT_TAIL:].tolist(),
            shown=prompt.shown,
            thoughts=prompt.thoughts,
        )
        self._text_out = self._new_text_out()
        self._is_complete = None if prompt.until is None else prompt.until()
        self._only_engine_ends = not params.stop and prompt.until is None
        self._include_stop_token = params.include_stop_str_in_output
        self._prompt_logprobs_due = params.prompt_logprobs is not None
        self._num_prompt_tokens = len(prompt.token_ids)
        self._has_thoughts = prompt.thoughts is not None
        self._routed: list[npt.NDArray[np.uint16]] | None = [] if params.return_routed_experts else None

    def assemble(self, update: Update) -> OutputDelta:
        """Convert an update to a delta. If its text ends the answer, a stop is sent to the engine."""
        out = self._text_out
        if update.routed_experts is not None:
            self.keep_experts(update.routed_experts)
        prompt_logprobs = self._prompt_logprobs(update.prompt_logprobs) if self._prompt_logprobs_due else None
        is_split = self._has_thoughts and len(update.token_ids) > 1
        # Most updates by far:
        if update.ended is None and update.logprobs is None and self._only_engine_ends and not is_split:
            text, token_ids, count = out.push(update.token_ids), update.token_ids, update.num_output_tokens
            cached, admitted = update.num_cached_tokens, update.admitted
            return OutputDelta(text, token_ids, None, None, None, count, cached, "", prompt_logprobs, admitted)
        if update.hypotheses:
            beams = [self._beam(found) for found in update.hypotheses]
            best, total, cached = beams[0], update.num_output_tokens, update.num_cached_tokens
            reason = best.finish_reason
            return OutputDelta("", [], None, reason, best.stop_reason, total, cached, "", None, update.admitted, beams)
        decoded: ListLike[int] = update.token_ids
        if update.ended is EndReason.STOPPED and decoded and not self._include_stop_token:
            decoded = decoded[:-1]
        before = update.num_output_tokens - len(update.token_ids)
        offsets: list[int] = []
        if update.logprobs is None and not is_split:
            texts = [out.push(decoded)]
        else:
            texts, offsets = self._push_one_by_one(out, decoded)
            offsets += [out.num_chars] * (len(update.token_ids) - len(offsets))
        if update.ended is not None and out.stop is None:
            texts.append(out.finish())
        text = "".join(texts)
        finish_reason = None if update.ended is None else update.ended.finish_reason
        stop_reason: int | str | None = update.stop_reason
        num_output_tokens = update.num_output_tokens
        if out.stop is not None:
            finish_reason, stop_reason = "stop", out.stop.text
            num_output_tokens = min(out.stop.num_output_tokens, num_output_tokens)
            if update.ended is None:
                self.sequence.stop_at(num_output_tokens)
        elif self._is_complete is not None and finish_reason is None and self._is_complete(text):
            finish_reason = "stop"
            self.sequence.stop_at(num_output_tokens)
        kept = num_output_tokens - before
        return OutputDelta(  # without names, which would double the time of the call
            text,
            update.token_ids[:kept],
            None if update.logprobs is None else self._place(update.logprobs, offsets, kept),
            finish_reason,
            stop_reason,
            num_output_tokens,
            update.num_cached_tokens,
            update.detail,
            prompt_logprobs,
            update.admitted,
            None,
            self._experts(num_output_tokens) if finish_reason is not None else None,
            texts if is_split else None,
            len(decoded) < len(update.token_ids),
            _timeline(update, finish_reason, num_output_tokens),
        )

    def keep_experts(self, rows: npt.NDArray[np.int32]) -> None:
        """Keep the experts of an update, in half of their size: no model has 65,536 experts."""
        if self._routed is not None:
            self._routed.append(rows.astype(np.uint16))

    def _experts(self, num_output_tokens: int) -> npt.NDArray[np.uint16] | None:
        """Return them for the last delta. The last token was sampled, and never computed.

        There may be more: a step can report tokens after a stop string.
        """
        if self._routed is None:
            return None
        rows = np.concatenate(self._routed) if self._routed else np.zeros((0, 0), np.uint16)
        return rows[: self._num_prompt_tokens + num_output_tokens - 1]

    def abort(self) -> None:
        self.sequence.abort()

    def _beam(self, found: Hypothesis) -> BeamOutput:
        reason, out = EndReason(found.reason), self._new_text_out()
        ends = reason is EndReason.STOPPED and not self._include_stop_token
        texts, _ = self._push_one_by_one(out, found.tokens[:-1] if ends else found.tokens)
        texts.append(out.finish())
        scores = found.score, found.logprob
        return BeamOutput("".join(texts), found.tokens, *scores, reason.finish_reason, found.stop_reason, texts)

    def _push_one_by_one(self, out: TextOut, token_ids: ListLike[int]) -> tuple[list[str], list[int]]:
        """Return the text that each token completes, and its text offset."""
        texts: list[str] = []
        offsets: list[int] = []
        for token in token_ids:
            offsets.append(out.num_chars)
            texts.append(out.push((token,)))
        return texts, offsets

    def _place(self, logprobs: list[TokenLogprobs], offsets: list[int], num_tokens: int) -> list[PlacedLogprobs]:
        """Attach offsets to those of the first tokens. The tokens that a fork begins with have no log probabilities."""
        num_without = len(offsets) - len(logprobs)
        kept = logprobs[: max(num_tokens - num_without, 0)]
        return [PlacedLogprobs(entry, offset) for entry, offset in zip(kept, offsets[num_without:], strict=False)]

    def _prompt_logprobs(self, table: LogprobArrays | None) -> LogprobArrays:
        """Return them for the first delta; empty for a prompt of one token, which has none."""
        self._prompt_logprobs_due = False
        return table or LogprobArrays.empty()


def _timeline(update: Update, finish_reason: str | None, num_output_tokens: int) -> list[TimelineEvent] | None:
    """Return the events for the last delta, with times since the first one. At a stop string the answer ends here."""
    if update.timeline is None or finish_reason is None:
        return None
    *before, last = update.timeline
    if last.event != "ended":
        before, last = [*before, last], TimelineEvent("ended", time.monotonic())
    last = msgspec.structs.replace(last, reason=finish_reason, tokens=num_output_tokens)
    events, began = (*before, last), update.timeline[0].seconds
    return [msgspec.structs.replace(each, seconds=round(each.seconds - began, 6)) for each in events]


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The first ``num_tokens`` output tokens of a sequence in flight."""

    sequence: Stream
    num_tokens: int


class StreamedAnswer(Answer):
    """An answer whose deltas are taken as they arrive."""

    __slots__ = ("_prompt_only", "_take")

    def __init__(
        self,
        sequence: Stream,
        text_in: TextIn,
        prompt: Prompt,
        params: SamplingParams,
        take: Callable[[], Update | None] | None = None,
        *,
        prompt_only: bool = False,
    ) -> None:
        """``take``: instead of the sequence's own; ``prompt_only``: the deltas contain nothing of the answer."""
        super().__init__(sequence, text_in, prompt, params)
        self._take = take or sequence.take
        self._prompt_only = prompt_only

    def take(self) -> OutputDelta | None:
        """Return the delta since the last call, or None; not to be called after the one with a finish reason.

        Raises:
            InvalidRequest, EngineError: as ``Stream.take``.
        """
        update = self._take()
        if update is None:
            return None
        if not update.token_ids and update.ended is None:
            if update.routed_experts is not None:
                self.keep_experts(update.routed_experts)
            return None
        delta = self.assemble(update)
        return delta.without_answer() if self._prompt_only else delta


def engines_of(answers: ListLike[StreamedAnswer]) -> str:
    """Return ``Stream.engines`` of the answers, each text once."""
    return "; ".join(dict.fromkeys(answer.sequence.engines for answer in answers))


async def start_answers(
    engine: EngineClient,
    text_in: TextIn,
    request_id: str,
    prompts: ListLike[Prompt],
    params: SamplingParams,
    terms: Terms,
    *,
    clamp_max_tokens: bool,
    prompt_only: bool = False,
    fork: ForkPoint | None = None,
    kept: KeptUpdates | None = None,
    on_update: Callable[[], None],
) -> list[StreamedAnswer]:
    """Submit ``params.n`` sequences for each prompt, all or none; answer ``i`` of prompt ``p`` is at ``p * n + i``.

    ``fork``: where in a sequence with the one prompt, and the same adapter, all of them begin; ``kept``: what the one
    sequence begins with, and what keeps its updates.

    The seed of sample ``i`` is derived from the request's seed and ``i``, so that it does not depend on ``n``.

    Raises:
        InvalidRequest, EngineError: as ``EngineClient.add``; sequences already submitted are aborted.
    """
    params = tokenize_bad_words(params, text_in, engine)
    fitted = [fit_params(params, prompt, engine, clamp=clamp_max_tokens) for prompt in prompts]
    check_volume(fitted, prompts, params.n)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    answers: list[StreamedAnswer] = []
    try:
        for prompt, sample_params in zip(prompts, fitted, strict=True):
            first = None if fork is None else fork.sequence
            for sample in range(params.n):
                is_last = len(answers) == len(prompts) * params.n - 1
                name, sample_seed = f"{request_id}-{len(answers)}", seed_for_sample(seed, sample)
                request = terms.request(name, prompt, sample_params, sample_seed, is_last=is_last)
                request = request if kept is None else kept.continued(request)
                parent = None if params.prompt_logprobs is not None else first
                num_shared = 0 if fork is None else fork.num_tokens
                sequence = await engine.add(request, on_update, parent=parent, num_shared=num_shared)
                first = first or sequence
                take = sequence.take if kept is None else kept.reader(sequence.take, on_update)
                answers.append(StreamedAnswer(sequence, text_in, prompt, params, take, prompt_only=prompt_only))
    except BaseException:  # also for a cancelled task
        for answer in answers:
            answer.abort()
        raise
    return answers
