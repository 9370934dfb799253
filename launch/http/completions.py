"""POST /v1/completions: raw text or token ids in, text out."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.launch.answers import Piece, PlacedLogprobs
from quire.launch.http.body import parse_body, read_body
from quire.launch.http.generate import Collected, Generation, Usage, new_request_id
from quire.launch.http.schema import CompletionRequest
from quire.launch.http.server import Server, in_thread_if_long
from quire.launch.prompts import MAX_PROMPTS, Prompt, encode_prompt
from quire.launch.text_out import TokenTexts
from quire.protocol.errors import InvalidRequest

# JSON has no infinity; this is what others write for a token that cannot be.
LOWEST_LOGPROB = -9999.0


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """OpenAI's four parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


async def completions(server: Server, request: Request) -> ASGIApp:
    """The route's handler."""
    server.require_serving()
    parsed = parse_body(await read_body(request), server.parser.completion)
    if len(parsed.prompts) * parsed.params.n > MAX_PROMPTS:
        raise InvalidRequest(f"prompts times n must be at most {MAX_PROMPTS}", "n")
    num_chars = sum(len(prompt) for prompt in parsed.prompts)
    prompts = await in_thread_if_long(
        num_chars, lambda: [encode_prompt(prompt, server.text_in, server.engine) for prompt in parsed.prompts]
    )
    return Generation(server, parsed, prompts, CompletionSpeller(server, parsed, prompts))


class CompletionSpeller:
    """Writes ``text_completion`` objects."""

    def __init__(self, server: Server, request: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self.request_id = new_request_id("cmpl")
        self._created = int(time.time())
        self._model = request.model
        self._include_usage = request.stream.include_usage
        self._token_texts = server.token_texts
        echoes = [_prompt_text(server, prompt) for prompt in prompts] if request.echo else []
        # What is still to be written before an answer's own text.
        self._echoes = dict(enumerate(text for text in echoes for _ in range(request.params.n)))

    def event(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        text = self._echoes.pop(index, "") + piece.text
        logprobs = None if piece.logprobs is None else spell_logprobs(piece.logprobs, self._token_texts)
        choice = CompletionChoice(index, text, logprobs, piece.finish_reason, piece.stop_reason)
        return self._object([choice], usage or (None if self._include_usage else UNSET))

    def usage_event(self, usage: Usage) -> bytes:
        return self._object([], usage)

    def whole(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        return self._object([self._choice(index, answer) for index, answer in enumerate(answers)], usage)

    def _choice(self, index: int, answer: Collected) -> CompletionChoice:
        text = self._echoes.pop(index, "") + "".join(answer.texts)
        logprobs = None if answer.logprobs is None else spell_logprobs(answer.logprobs, self._token_texts)
        return CompletionChoice(index, text, logprobs, answer.finish_reason, answer.stop_reason)

    def _object(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            Completion(self.request_id, "text_completion", self._created, self._model, choices, usage)
        )


def spell_logprobs(placed: Sequence[PlacedLogprobs], texts: TokenTexts) -> CompletionLogprobs:
    """Log probabilities in the form of completions. The sampled token is always among the best ones given."""
    return CompletionLogprobs(
        tokens=[texts.text(entry.logprobs.token_id) for entry in placed],
        token_logprobs=[max(entry.logprobs.logprob, LOWEST_LOGPROB) for entry in placed],
        top_logprobs=[_best(entry, texts) for entry in placed],
        text_offset=[entry.text_offset for entry in placed],
    )


def _best(entry: PlacedLogprobs, texts: TokenTexts) -> dict[str, float]:
    best: dict[str, float] = {}
    for token_id, logprob in (*entry.logprobs.top, (entry.logprobs.token_id, entry.logprobs.logprob)):
        # Two tokens may have the same text; the likelier one keeps the name.
        best.setdefault(texts.text(token_id), max(logprob, LOWEST_LOGPROB))
    return best


def _prompt_text(server: Server, prompt: Prompt) -> str:
    return server.text_in.decode(prompt.token_ids.tolist()) if prompt.text is None else prompt.text
