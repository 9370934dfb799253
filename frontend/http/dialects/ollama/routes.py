"""The routes of Ollama's API: their handlers, but for vectors, and what the server has in the form of that API."""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS
from quire.frontend.http.dialects.ollama.answers import LINES, OllamaFormatter, answer_object
from quire.frontend.http.dialects.ollama.body import ChatBody, GenerateBody, parse_body, served_name
from quire.frontend.http.dialects.ollama.embeddings import EmbedBody, embed
from quire.frontend.http.routes.conversation import AnswerReader, PlainAnswer, encode_conversation
from quire.frontend.http.routes.generate import Generation, new_request_id
from quire.frontend.http.routes.models import Card, cards, find_card
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.schema import ChatRequest
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server
from quire.frontend.text.prompts import encode_prompt

API_VERSION = "0.32.15"
"""The version of Ollama whose API this is. Clients require a least one."""
STREAM = LINES.media_type.decode()
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: what older clients send. The other fields have no effect here."""

    model: str | None = None
    name: str | None = None


async def version(server: Server, request: Request) -> Response:
    return json_response({"version": API_VERSION})


async def tags(server: Server, request: Request) -> Response:
    return json_response({"models": [_entry(server, card) for card in await cards(server)]})


async def running(server: Server, request: Request) -> Response:
    loaded = {"expires_at": NEVER, "size_vram": 0, "context_length": server.engine.max_model_len}
    return json_response({"models": [_entry(server, card) | loaded for card in await cards(server)]})


async def show(server: Server, request: Request) -> Response:
    body, _ = await read_json(request, server.texts, lambda raw: read(ShowBody, raw, besides=raw))
    name = served_name(server.parser, body.model or body.name)
    entry, template = _entry(server, await find_card(server, name)), server.text_in.template
    family = entry["details"]["family"]
    context = {f"{family}.context_length": server.engine.max_model_len}
    info = {"general.architecture": family, "general.basename": name, **context}
    return json_response({"template": "" if template is None else template.source, "model_info": info, **entry})


def _entry(server: Server, card: Card) -> dict[str, Any]:
    """Return what lists have of a model. No files are read for it: the size is 0, and ``digest`` is of the name."""
    name, form, tasks = card["id"], server.settings.answer_format, server.capabilities.tasks
    # As GGUF files name it: qwen3moe for Qwen3MoeForCausalLM.
    family = server.settings.architecture.partition("For")[0].removesuffix("Model").lower()
    details = {"parent_model": card.get("parent") or "", "format": "", "family": family, "families": [family]}
    capabilities = {
        "completion": "generate" in tasks,
        "tools": form is not None and form.whole.has_calls,
        "thinking": form is not None and form.has_thoughts,
        "vision": server.parser.reads_images,
        "embedding": "embed" in tasks,
    }
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(card["created"], UTC),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details | {"parameter_size": "", "quantization_level": ""},
        "capabilities": [each for each, has in capabilities.items() if has],
    }


async def _answer(kind: type[ChatBody | GenerateBody], server: Server, request: Request) -> ASGIApp:
    """Answer a conversation, or a prompt."""
    server.require_generation(request.scope["path"])
    parsed, body = await read_json(request, server.texts, lambda raw: parse_body(kind, server.parser, raw))
    asked = parsed.asked
    if asked is None:
        await server.check_model(parsed.served)
        return json_response(answer_object(parsed, {}, {"done": True, "done_reason": "load"}))
    new_reader: Callable[[], AnswerReader] = PlainAnswer
    if isinstance(asked, ChatRequest):
        prompt, new_reader = await encode_conversation(server, asked, len(body))
    else:
        (text,) = asked.prompts
        assert isinstance(text, str)  # as the field
        prompt = await server.texts.run(len(body), lambda: encode_prompt(text, server.text_in, server.engine))
    formatter = OllamaFormatter(server, parsed, prompt, new_reader(), new_request_id(server, "ollama-", request))
    return Generation(server, asked, [prompt], formatter, LINES)


ROUTES = (
    Row("POST", "/api/chat", partial(_answer, ChatBody), ChatBody, PASSED_FIELDS, stream=STREAM),
    Row("POST", "/api/generate", partial(_answer, GenerateBody), GenerateBody, PASSED_FIELDS, stream=STREAM),
    Row("POST", "/api/embed", partial(embed, "input"), EmbedBody),
    Row("POST", "/api/embeddings", partial(embed, "prompt"), EmbedBody),
    Row("GET", "/api/tags", tags),
    Row("GET", "/api/ps", running),
    Row("POST", "/api/show", show, ShowBody),
    Row("GET", "/api/version", version),
)
