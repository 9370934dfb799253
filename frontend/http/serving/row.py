"""Row: one line of the route table."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.frontend.http.serving.server import Server

Handler = Callable[[Server, Request], Awaitable[ASGIApp]]


class Row(NamedTuple):
    """The handler of a path, and what the description of the routes says of it.

    Attributes:
        methods: separated by blanks.
        body: the fields of the body that a POST has; None: it has none.
        besides: further fields of the body, those of SamplingParams among them.
        query: parameters of the query.
        stream: content type of a stream, if the body has a field ``stream``.
    """

    methods: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    besides: Sequence[str] = ()
    query: Sequence[str] = ()
    stream: str = "text/event-stream"
