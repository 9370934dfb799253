"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for conversations."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.frontend.http.dialects.chat_fields import PASSED_FIELDS
from quire.frontend.http.dialects.messages_body import MessagesBody, parse_messages
from quire.frontend.http.dialects.messages_events import MessageFormatter
from quire.frontend.http.routes.conversation import encode_conversation
from quire.frontend.http.routes.generate import Generation, new_request_id
from quire.frontend.http.serving.body import json_response, read_json
from quire.frontend.http.serving.gate import IGNORED_FIELDS
from quire.frontend.http.serving.row import Row
from quire.frontend.http.serving.server import Server


async def create_message(server: Server, request: Request) -> ASGIApp:
    server.require_generation(request.scope["path"])
    parsed, body = await read_json(request, server.texts, lambda raw: parse_messages(server.parser, raw))
    prompt, new_reader = await encode_conversation(server, parsed.chat, len(body))
    formatter = MessageFormatter(parsed, len(prompt.token_ids), new_reader(), new_request_id(server, "msg_", request))
    return Generation(server, parsed.chat, [prompt], formatter, formatter.style)


async def count_message_tokens(server: Server, request: Request) -> Response:
    parsed, body = await read_json(
        request, server.texts, lambda raw: parse_messages(server.parser, raw, count_only=True)
    )
    request.scope["state"][IGNORED_FIELDS] = parsed.chat.ignored
    await server.check_model(parsed.chat.model)
    prompt, _ = await encode_conversation(server, parsed.chat, len(body))
    return json_response({"input_tokens": len(prompt.token_ids)})


ROUTES = (
    Row("POST", "/v1/messages", create_message, MessagesBody, PASSED_FIELDS),
    Row("POST", "/v1/messages/count_tokens", count_message_tokens, MessagesBody, PASSED_FIELDS),
)
