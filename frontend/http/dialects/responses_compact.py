"""POST /v1/responses/compact: a conversation as one item that holds the model's summary of it."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.http.dialects.parts import whole_parts
from quire.frontend.http.dialects.responses import encode_request, read_with_stored
from quire.frontend.http.dialects.responses_body import Lookup, ResponsesRequest, parse_responses
from quire.frontend.http.dialects.responses_events import token_counts
from quire.frontend.http.dialects.responses_input import input_items, sealed_summary
from quire.frontend.http.routes.conversation import AnswerReader
from quire.frontend.http.routes.formatter import Collected, ResponseFormatter, Usage
from quire.frontend.http.routes.generate import Generation
from quire.frontend.http.schema.errors import ApiError
from quire.frontend.http.schema.schema import Parser
from quire.frontend.http.serving.body import read_body
from quire.frontend.http.serving.server import Server
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
    body = await read_body(request)
    parsed = await read_with_stored(server, server.responses_of(request.scope), body, partial(_parse, server.parser))
    prompt, new_reader = await encode_request(server, parsed, len(body))
    return Generation(server, parsed.chat, [prompt], _SummaryFormatter(len(prompt.token_ids), new_reader()))


def _parse(parser: Parser, raw: Mapping[str, Any], lookup: Lookup) -> ResponsesRequest:
    if raw.get("model") is None:
        raise InvalidRequest("model is required", "model", "missing_required_parameter")
    items = [] if raw.get("input") is None else input_items(raw["input"], MAX_MESSAGES - 1)
    if not items and raw.get("previous_response_id") is None:
        raise InvalidRequest("input is required", "input", "missing_required_parameter")
    fields = {name: value for name, value in raw.items() if name not in LEFT_OUT} | OWN_FIELDS
    fields["input"] = [*items, {"role": "user", "content": ASK}]
    parsed = parse_responses(parser, fields, lookup)
    chat = parsed.chat
    params = msgspec.structs.replace(chat.params, max_tokens=MAX_TOKENS)
    return replace(parsed, chat=replace(chat, params=params, clamp_max_tokens=True))


class _SummaryFormatter(ResponseFormatter):
    """Formats the one object of a compaction; it is never streamed."""

    def __init__(self, num_prompt_tokens: int, reader: AnswerReader) -> None:
        super().__init__(f"cmp_{uuid.uuid4().hex}")
        self._num_prompt_tokens = num_prompt_tokens
        self._reader = reader

    def response(self, answers: Sequence[Collected], usage: Usage) -> bytes:
        (answer,) = answers
        parts = whole_parts(self._reader.push("".join(answer.texts), last=True))
        summary = "".join(part.text for part in parts if part.kind == "text").strip()
        if not summary:
            raise ApiError(422, "the model wrote no summary: send the conversation itself", "input", "request_failed")
        cached, num_output = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        item = {"id": f"cmp_{uuid.uuid4().hex}", "type": "compaction", "encrypted_content": sealed_summary(summary)}
        return msgspec.json.encode(
            {
                "id": self.request_id,
                "object": "response.compaction",
                "created_at": int(time.time()),
                "output": [item],
                "usage": token_counts(self._num_prompt_tokens, cached, num_output, 0),
            }
        )
