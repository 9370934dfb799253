"""POST /tokenize and /detokenize, and GET /tokenizer_info, with vLLM's fields."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.schema.bodies import DetokenizeBody, TokenizeBody
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import Parser
from quire.frontend.http.schema.tools import parse_tools
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.gate import IGNORED_FIELDS
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.text.chat_template import Message
from quire.frontend.text.prompts import check_token_ids
from quire.frontend.text.text_in import NO_TOKENIZER, ChatOptions
from quire.protocol.errors import InvalidRequest

MAX_DETOKENIZED = 2**19


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """``prompt``: text, or the messages of a conversation and the template options to render them with."""

    model: str
    prompt: str | tuple[list[Message], ChatOptions]
    add_special_tokens: bool
    return_token_strs: bool


async def tokenize(server: Server, request: Request) -> Response:
    ignored = _ignored(server, request)
    parsed, body = await read_json(request, server.texts, lambda raw: _parse_tokenize(server.parser, raw, ignored))
    await server.check_model(parsed.model)
    if isinstance(parsed.prompt, str):
        return json_response(await server.texts.run(len(body), lambda: _tokenized(server, parsed)))
    _, options = parsed.prompt
    await options.images.read(server.settings.images)
    return json_response(await server.conversations.run(len(body), options, lambda: _tokenized(server, parsed)))


async def detokenize(server: Server, request: Request) -> Response:
    ignored = _ignored(server, request)
    parsed, body = await read_json(request, server.texts, lambda raw: _parse_detokenize(server.parser, raw, ignored))
    model, tokens = parsed
    await server.check_model(model)
    if server.text_in.tokenizer is None:
        raise InvalidRequest(NO_TOKENIZER, "tokens")
    text = await server.texts.run(len(body), lambda: server.text_in.decode(tokens, skip_special_tokens=False))
    return json_response({"prompt": text})


async def tokenizer_info(server: Server, request: Request) -> Response:
    """Return what a client needs to tokenize and render conversations by this server, as lm-eval does."""
    if server.text_in.tokenizer is None:
        raise InvalidRequest(NO_TOKENIZER)
    template = server.text_in.template
    info = {"chat_template": None if template is None else template.source}
    return json_response({**server.text_in.tokenizer_info, **info, "model_max_length": server.engine.max_model_len})


ROUTES = (
    Row("POST", "/tokenize", tokenize, TokenizeBody),
    Row("POST", "/detokenize", detokenize, DetokenizeBody),
    Row("GET", "/tokenizer_info", tokenizer_info),
)


def _ignored(server: Server, request: Request) -> Ignored:
    """Return the collector of the request's unknown fields, which the response will name."""
    ignored = Ignored(server.parser.unknown_fields)
    request.scope["state"][IGNORED_FIELDS] = ignored.names
    return ignored


def _tokenized(server: Server, request: TokenizeRequest) -> dict[str, Any]:
    context = server.engine.max_model_len
    if isinstance(request.prompt, str):
        tokens = server.text_in.encode(
            request.prompt, add_special_tokens=request.add_special_tokens, max_tokens=context
        )
    else:
        tokens = server.text_in.encode_chat(*request.prompt, context)
    strings = [server.token_texts.text(token) for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": context, "tokens": tokens, "token_strs": strings}


def _parse_tokenize(parser: Parser, raw: Mapping[str, Any], ignored: Ignored) -> TokenizeRequest:
    body = read(TokenizeBody, raw, ignored=ignored)
    model = parser.model(body.model)
    prompt: str | tuple[list[Message], ChatOptions]
    if body.messages is not None:
        messages, options = parser.conversation(body, ignored)
        tools, _ = parse_tools(body.tools, None, parallel=True, ignored=ignored)
        prompt = messages, replace(options, tools=tools)
    elif body.prompt is not None:
        prompt = body.prompt
    else:
        raise InvalidRequest("prompt is required", "prompt", "missing_required_parameter")
    return TokenizeRequest(model, prompt, body.add_special_tokens, body.return_token_strs)


def _parse_detokenize(parser: Parser, raw: Mapping[str, Any], ignored: Ignored) -> tuple[str, list[int]]:
    body = read(DetokenizeBody, raw, ignored=ignored)
    model = parser.model(body.model)
    if isinstance(body.tokens, list) and len(body.tokens) > MAX_DETOKENIZED:
        text = f"tokens must hold at most {MAX_DETOKENIZED} token ids (got {len(body.tokens)})"
        raise InvalidRequest(text, "tokens")
    return model, check_token_ids(body.tokens, parser.limits.vocab_size, "tokens")
