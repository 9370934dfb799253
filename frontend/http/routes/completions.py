"""POST /v1/completions: from raw text or token ids to text."""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.engine.answers import OutputDelta, PlacedLogprobs
from quire.frontend.http.routes.formatter import (
    Collected,
    ExpertsBody,
    ResponseFormatter,
    Usage,
    encode_choices,
    experts_body,
    scores,
)
from quire.frontend.http.routes.generate import Generation, new_request_id
from quire.frontend.http.routes.sessions import as_piece, begin_piece, relay_piece
from quire.frontend.http.schema.bodies import CompletionBody
from quire.frontend.http.schema.schema import READ_ELSEWHERE, CompletionRequest, GivenPrompt
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.text.logprob import Logprob, logprob_by_id
from quire.frontend.text.prompts import MAX_PROMPTS, Prompt, encode_prompt, prompt_of_rows
from quire.frontend.text.text_out import TextOut, TokenTexts
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.logprobs import LogprobArrays, TokenLogprobs
from quire.protocol.wire.timeline import TimelineEvent

# Written for -inf, which JSON does not have; vLLM writes the same number.
LOWEST_LOGPROB = -9999.0


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's four parallel lists. The first token of an echoed prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """``score``, ``cumulative_logprob``: of outputs of a beam search."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[dict[int, Logprob] | None] | UnsetType = UNSET
    score: float | UnsetType = UNSET
    cumulative_logprob: float | UnsetType = UNSET
    routed_experts: ExpertsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timeline: list[TimelineEvent] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: Sequence[CompletionChoice | msgspec.Raw]
    usage: Usage | UnsetType | None = UNSET


async def completions(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])
    parsed, body = await read_json(request, server.texts, server.parser.completion)
    if parsed.session is not None and (elsewhere := await relay_piece(server, request, parsed, body)) is not None:
        return elsewhere
    num_sequences = len(parsed.prompts) * parsed.params.num_outputs
    if num_sequences > MAX_PROMPTS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_PROMPTS} (got {num_sequences})", "n")
    special, found = parsed.add_special_tokens, None
    if parsed.session is not None:
        found = begin_piece(server, request, parsed.session, is_chat=False)
        special = special and not found.tokens
    given = parsed.prompts if found is None else [prompt for prompt in parsed.prompts if prompt]

    def encode(prompt: GivenPrompt) -> Prompt:
        if callable(prompt):
            return prompt_of_rows(prompt(), server.engine)
        return encode_prompt(prompt, server.text_in, server.engine, add_special_tokens=special)

    prompts = await server.texts.run(len(body), lambda: [encode(each) for each in given])
    piece = None
    if parsed.session is not None and found is not None:
        piece, prompt = as_piece(server, found, parsed.session, next(iter(prompts), None))
        prompts = [prompt]
    request_id = new_request_id(server, "cmpl-", request)
    new_formatter = partial(CompletionFormatter, server)
    formatter = new_formatter(parsed, prompts, request_id)
    return Generation(server, parsed, prompts, formatter, new_formatter=new_formatter, piece=piece)


ROUTES = (Row("POST", "/v1/completions", completions, CompletionBody, READ_ELSEWHERE),)


class CompletionFormatter(ResponseFormatter):
    """Formats ``text_completion`` objects."""

    def __init__(self, server: Server, request: CompletionRequest, prompts: Sequence[Prompt], request_id: str) -> None:
        super().__init__(request_id)
        self._created = int(time.time())
        self._model = request.model
        self._include_usage = request.stream_options.include_usage
        self._token_texts = server.token_texts
        self._moe = server.settings.moe
        self._num_logprobs = request.params.logprobs
        self._num_prompt_logprobs = request.prompt_logprobs
        self._num_generated, self._num_returned = request.params.num_outputs, request.num_returned
        self._hides_logprobs = request.hides_logprobs
        # The prompts to write before the output text, and the choices that are still without it.
        echoes = [_Echo(server, prompt) for prompt in prompts] if request.echo else []
        self._echoes = [echo for echo in echoes for _ in range(request.num_returned)]
        self._not_started = set(range(len(self._echoes)))
        self._returns_ids = request.returns_token_ids
        self._prompts = [prompt for prompt in prompts for _ in range(request.num_returned)]
        self._with_prompt_ids: set[int] = set()
        """Choices whose prompt's ids are sent."""

    def event(self, index: int, delta: OutputDelta, usage: Usage | None) -> bytes:
        return self._object([self._choice(index, delta.text, delta)], usage or (None if self._include_usage else UNSET))

    def usage_event(self, usage: Usage) -> bytes:
        return self._object([], usage)

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        if self._num_returned < self._num_generated:
            answers = self._best(answers)
        choices = encode_choices(answers, lambda index, answer: self._choice(index, "".join(answer.texts), answer))
        return self._object(choices, usage)

    def _best(self, answers: Sequence[Collected]) -> list[Collected]:
        """Return the best answers of each prompt: those with the highest sum of log probabilities, in this order."""
        best: list[Collected] = []
        for first in range(0, len(answers), self._num_generated):
            of_prompt = answers[first : first + self._num_generated]
            best += sorted(of_prompt, key=cumulative_logprob, reverse=True)[: self._num_returned]
        for answer in best if self._hides_logprobs else ():
            answer.logprobs = None
        return best

    def _choice(self, index: int, text: str, answer: OutputDelta | Collected) -> CompletionChoice:
        logprobs = None
        if answer.logprobs is not None:
            shift = len(self._echoes[index].text) if self._echoes else 0
            logprobs = format_logprobs(answer.logprobs, self._token_texts, shift)
        if index in self._not_started:
            self._not_started.discard(index)
            echo = self._echoes[index]
            text = echo.text + text
            if logprobs is not None and answer.prompt_logprobs is not None:
                begin = echo.logprobs(answer.prompt_logprobs, self._num_logprobs or 0, self._token_texts)
                logprobs = join_logprobs(begin, logprobs)
        prompt_logprobs = format_prompt_logprobs(answer.prompt_logprobs, self._num_prompt_logprobs, self._token_texts)
        ended = answer.finish_reason, answer.stop_reason, prompt_logprobs
        experts, ids = experts_body(answer, self._moe), self._token_ids(index, answer)
        timeline = answer.timeline or UNSET
        return CompletionChoice(index, text, logprobs, *ended, *scores(answer), experts, *ids, timeline)

    def _token_ids(
        self, index: int, answer: OutputDelta | Collected
    ) -> tuple[list[int] | UnsetType, list[int] | UnsetType]:
        """Return the ids of the answer, and in the first chunk those of its prompt, if they are requested."""
        if not self._returns_ids:
            return UNSET, UNSET
        is_first = index not in self._with_prompt_ids
        self._with_prompt_ids.add(index)
        return answer.token_ids, self._prompts[index].token_ids.tolist() if is_first else UNSET

    def _object(self, choices: Sequence[CompletionChoice | msgspec.Raw], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            Completion(self.request_id, "text_completion", self._created, self._model, choices, usage)
        )


def format_logprobs(placed: Sequence[PlacedLogprobs], texts: TokenTexts, shift: int = 0) -> CompletionLogprobs:
    """Return log probabilities in completions format. ``top_logprobs`` always include the sampled token.

    ``shift``: number of characters before the output text.
    """
    return CompletionLogprobs(
        tokens=[texts.text(entry.logprobs.token_id) for entry in placed],
        token_logprobs=[max(entry.logprobs.logprob, LOWEST_LOGPROB) for entry in placed],
        top_logprobs=[_best(entry.logprobs, texts) for entry in placed],
        text_offset=[shift + entry.text_offset for entry in placed],
    )


def cumulative_logprob(answer: Collected) -> float:
    return sum(placed.logprobs.logprob for placed in answer.logprobs or ())


def join_logprobs(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + then.tokens,
        first.token_logprobs + then.token_logprobs,
        first.top_logprobs + then.top_logprobs,
        first.text_offset + then.text_offset,
    )


def format_prompt_logprobs(
    table: LogprobArrays | None, num_best: int | None, texts: TokenTexts
) -> list[dict[int, Logprob] | None] | UnsetType:
    """Return vLLM's format: per prompt token, a map from token id to Logprob. UNSET if not requested or not present."""
    if table is None or num_best is None:
        return UNSET
    return [None, *(logprob_by_id(entry, texts, lowest=LOWEST_LOGPROB) for entry in table.entries(num_best))]


class _Echo:
    """A prompt as the beginning of its choices."""

    def __init__(self, server: Server, prompt: Prompt) -> None:
        self._text_in = server.text_in
        self._token_ids = prompt.token_ids
        self.text = server.text_in.decode(prompt.token_ids.tolist()) if prompt.text is None else prompt.text

    def logprobs(self, table: LogprobArrays, num_best: int, texts: TokenTexts) -> CompletionLogprobs:
        """Return the log probabilities of the prompt's tokens; the first token has none."""
        ids = self._token_ids.tolist()
        out = TextOut(self._text_in.tokenizer)
        offsets: list[int] = []
        for token in ids:
            # The tokenizer may add to the text or drop from it: offsets never pass its end.
            offsets.append(min(out.num_chars, len(self.text)))
            out.push((token,))
        entries = table.entries(num_best)
        best = [_best(entry, texts) for entry in entries]
        values = [max(entry.logprob, LOWEST_LOGPROB) for entry in entries]
        return CompletionLogprobs([texts.text(token) for token in ids], [None, *values], [None, *best], offsets)


def _best(entry: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    best: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        # Two tokens may have the same text; the more likely one is kept.
        best.setdefault(texts.text(token_id), max(logprob, LOWEST_LOGPROB))
    return best
