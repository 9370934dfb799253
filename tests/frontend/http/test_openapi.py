"""The description of the routes: it names each of them, and exactly the fields that their bodies may have."""

import asyncio
import itertools
import re
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from pooled_vectors import BOTH, CLASSIFIER
from starlette.routing import Route
from tiers import thinned

from quire.frontend.http.app import ADAPTER_ROUTES, ADMIN_ROUTES, ROUTES, make_app
from quire.frontend.http.schema.foreign_fields import UNSUPPORTED
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.protocol.model.pooling_config import PoolingConfig

ANSWERED: dict[str, Any] = dict.fromkeys(("input", "prompt", "query", "text_1", "text_2"), "hello") | {
    "model": "tiny",
    "max_tokens": 5,
    "documents": ["hello"],
    "tokens": [5],
    "messages": [{"role": "user", "content": "hello"}],
    "questions": [{"type": "predicate", "instructions": "It is a greeting."}],
}
"""Fields with which all routes answer."""
LENIENT = "/api/show"
"""It ignores all other fields."""
PATHS_OF_BODIES = [re.sub(r":\w+}", "}", row.path) for row in ROUTES + ADAPTER_ROUTES if row.body]
PATHS_OF_BODIES.remove(LENIENT)


KEYLESS = ("/", "/docs", "/openapi.json", "/health", "/ready", "/metrics")


@pytest.fixture
def serve(engine: Any, text_in: Any, client: Any) -> Any:
    """Return a client of a server with all routes, which refuses unknown fields."""

    def serve(pooling: PoolingConfig = BOTH, **given: Any) -> Any:
        given = {"admin_api_keys": ("admin",), "adapters": object()} | given
        given = {"capabilities": Capabilities(True, pooling), "unknown_fields": "refuse"} | given
        return type(client)(make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",), **given)))

    return serve


def fields(described: Any, path: str) -> set[str]:
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return set(described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])


def test_each_route_and_method_is_described(serve: Any) -> None:
    whole = serve()
    response = whole.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    described = response.json()
    assert described["servers"] == [{"url": "/"}]
    assert serve(root_path="/quire").get("/quire/openapi.json").json()["servers"] == [{"url": "/quire"}]
    found = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    routes = [route for route in whole.app.routes if isinstance(route, Route)]
    expected = {(route.path_format, method) for route in routes for method in (route.methods or set()) - {"HEAD"}}
    assert found == expected and len(routes) == len(ROUTES + ADMIN_ROUTES + ADAPTER_ROUTES) + 1
    for path, methods in described["paths"].items():
        for name, operation in methods.items():
            given = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert all(f"{{{each}}}" in path for each in given) and path.count("{") == len(given)
            assert operation["summary"] and (name == "post" or "requestBody" not in operation)
            assert ("security" in operation) == (path in KEYLESS)


@pytest.mark.parametrize("path", thinned(PATHS_OF_BODIES, keep=2))
def test_a_body_may_have_the_fields_that_are_described_and_no_others(serve: Any, path: str) -> None:
    whole = serve(CLASSIFIER if "classify" in path else BOTH)
    required = {"model": "tiny", "input": "x"} if path == "/v1/responses/compact" else {}
    described = whole.get("/openapi.json").json()
    own = fields(described, path)
    others = set().union(*(fields(described, each) for each in PATHS_OF_BODIES)) - UNSUPPORTED.keys()

    async def known() -> set[str]:
        headers, found = {"authorization": "Bearer admin"}, set()
        transport = httpx.ASGITransport(whole.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            for name in others | own:
                answer = await client.post(path.replace("{id}", "cmpl-1"), json={**required, name: 1})
                if "unknown field" not in answer.text:
                    found.add(name)
        return found

    assert asyncio.run(known()) == own


@pytest.mark.slow
@pytest.mark.parametrize("path", [re.sub(r":\w+}", "}", row.path) for row in ROUTES + ADMIN_ROUTES])
def test_generated_requests_get_described_responses(serve: Any, engine: Any, path: str) -> None:
    """Schemathesis sends valid bodies and invalid ones, and bodies that would be answered with one field of them.

    None is a server error, and each answer is as described.
    """
    import schemathesis
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as of_openapi

    engine.max_model_len = 4000
    client = serve(CLASSIFIER if "classify" in path else BOTH, unknown_fields="ignore", adapters=None)
    described = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(described)
    expected = [checks.not_a_server_error, of_openapi.status_code_conformance]
    expected += [of_openapi.content_type_conformance, of_openapi.response_schema_conformance]
    known = fields(described, path) if path in [*PATHS_OF_BODIES, LENIENT] else set()
    besides = {"messages"} if known & {"input", "prompt"} else set()
    besides |= {"prompt"} if "responses" in path else set()
    answered = {name: value for name, value in ANSWERED.items() if name in known - besides}
    for method, mode in itertools.product(schema[path], schemathesis.GenerationMode):

        @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=schema[path][method].as_strategy(mode), data=st.data())
        def sent(case: Any, data: Any) -> None:
            given = case.as_transport_kwargs(base_url="http://test")
            body = {"content": given["data"]} if given.get("data") else {"json": given.get("json")}
            names = sorted(known.intersection(case.body)) if isinstance(case.body, dict) else []
            if names and data.draw(st.booleans()):
                name = data.draw(st.sampled_from(names))
                body = {"json": answered | {name: case.body[name]}}
            query, headers = given.get("params"), {**given["headers"], "authorization": "Bearer admin"}
            answer = client.request(given["method"], given["url"], params=query, headers=headers, **body)
            case.validate_response(answer, checks=expected)

        try:
            sent()
        except Unsatisfiable:  # a request without parameters cannot be invalid
            assert mode is schemathesis.GenerationMode.NEGATIVE
