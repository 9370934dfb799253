"""POST /v1/responses/compact: a conversation as one item that holds the model's summary of it."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.http.dialects.responses_body import ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_events import ResponsesFormatter, encode_request
from quire.frontend.http.dialects.responses_input import SUMMARY, input_items, sealed
from quire.frontend.http.routes.formatter import Collected, Usage
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.schema.schema import Parser
from quire.frontend.http.serving.body import read_json
from quire.frontend.http.serving.server import Server
from quire.frontend.http.stored.response_store import OwnResponses
from quire.frontend.text.message_checks import MAX_MESSAGES
from quire.protocol.errors import InvalidRequest

ASK = (
    "Summarise this conversation so that another reader can continue it from the summary alone. Keep the user's "
    "requests and constraints, decisions, names, numbers, paths, results of tools, and what is left to do. "
    "Write only the summary."
)
MAX_TOKENS = 2048
"""Limit on the tokens of a summary; fewer if the context has no room for them."""
OWN_FIELDS = {"stream": False, "store": False, "reasoning": {"effort": "none"}}
LEFT_OUT = ("tools", "tool_choice", "text", "max_output_tokens", "generate", "top_logprobs", "include", "background")
"""Fields of a response that have no meaning here."""


async def compact(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])
    own = server.responses_of(request.scope)
    parsed, body = await read_json(request, server.texts, lambda raw: _parse(server.parser, raw, own))
    prompt, new_reader = await encode_request(server, parsed, len(body))
    formatter = _SummaryFormatter(server, parsed, prompt, new_reader(), response_id=f"cmp_{uuid.uuid4().hex}")
    return Generation(server, parsed.chat, [prompt], formatter)


def _parse(parser: Parser, raw: Mapping[str, Any], stored: OwnResponses) -> ResponsesRequest:
    if raw.get("model") is None:
        raise InvalidRequest("model is required", "model", "missing_required_parameter")
    items = [] if raw.get("input") is None else input_items(raw["input"], MAX_MESSAGES - 1)
    if not items and raw.get("previous_response_id") is None:
        raise InvalidRequest("input is required", "input", "missing_required_parameter")
    fields = {name: value for name, value in raw.items() if name not in LEFT_OUT} | OWN_FIELDS
    fields["input"] = [*items, {"role": "user", "content": ASK}]
    parsed = parse_responses(parser, fields, stored)
    chat = parsed.chat
    params = msgspec.structs.replace(chat.params, max_tokens=MAX_TOKENS)
    return replace(parsed, chat=replace(chat, params=params, clamp_max_tokens=True))


class _SummaryFormatter(ResponsesFormatter):
    """Formats the one object of a compaction; it is never streamed."""

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        whole = msgspec.json.decode(super().response(answers, usage))
        said = (part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"])
        summary = "".join(said).strip()
        if not summary:
            raise ApiError(422, "the model wrote no summary: send the conversation itself", "input", "request_failed")
        item = {"id": f"cmp_{uuid.uuid4().hex}", "type": "compaction", "encrypted_content": sealed(SUMMARY, summary)}
        kept = {name: whole[name] for name in ("id", "created_at", "usage")}
        return msgspec.json.encode({**kept, "object": "response.compaction", "output": [item]})
