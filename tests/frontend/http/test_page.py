"""The page at ``/``: its response, what its policy allows, and that it uses only what the server has."""

import hashlib
import re
from importlib import resources
from typing import Any

import pytest
from exported_metrics import exported_labels
from fake_engine import FakeEngine

from quire.frontend.http.app import ADMIN_ROUTES, ROUTES, make_app
from quire.frontend.http.page.content_policy import source_of
from quire.frontend.http.page.page import LIBRARY, LICENCES, PAGE
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.text_in import TextIn

TEXT = PAGE.decode()
STYLE, SCRIPT = (re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL) for tag in ("style", "script"))
MARKUP = TEXT.replace(STYLE[0], "").replace(SCRIPT[0], "")
OWN = SCRIPT[0].removeprefix(LICENCES + LIBRARY)


@pytest.fixture
def keyed(client: Any, engine: FakeEngine, text_in: TextIn) -> Any:
    return type(client)(
        make_app(engine, ServerSettings(text_in=text_in, served_model_names=("tiny",), api_keys=("k",)))
    )


@pytest.mark.parametrize("accept", ["*/*", "text/html,application/xhtml+xml,*/*;q=0.8", "text/html, application/json"])
def test_the_page_needs_no_key(keyed: Any, accept: str) -> None:
    answer = keyed.get("/", headers={"accept": accept})
    assert (answer.status_code, answer.content) == (200, PAGE)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert keyed.get("/v1/models").status_code == 401


def test_clients_of_the_api_get_404(keyed: Any, client: Any) -> None:
    for each in (keyed, client):
        answer = each.get("/", headers={"accept": "application/json"})
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
        assert each.request("POST", "/").status_code == 405


def test_a_foreign_host_name_is_refused(client: Any) -> None:
    assert client.get("/", headers={"host": "rebound.example.com"}).status_code == 403


def test_the_policy_allows_the_pages_own_script_and_style_only(client: Any) -> None:
    policy = dict(part.split(" ", 1) for part in client.get("/").headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert len(STYLE) == len(SCRIPT) == 1
    assert (policy["style-src"], policy["script-src"]) == (source_of(STYLE[0]), source_of(SCRIPT[0]))
    assert not re.search(r"\bon\w+\s*=|\bstyle\s*=|javascript:|https?://|\bsrc\s*=", MARKUP)
    for script in (OWN, LIBRARY):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", script)
    assert not re.search(r"Storage|cookie|https?://|location", OWN), "the key stays in memory, out of addresses"


def test_the_vendored_parser_is_unchanged_and_its_licences_are_in_the_page() -> None:
    folder = resources.files("quire.frontend.http.page") / "assets" / "vendor"
    listed = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE))
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert found.pop("README.md") and listed == found
    assert SCRIPT[0] == LICENCES + LIBRARY + OWN and LICENCES.count("Permission is hereby granted") == 6
    assert len(PAGE) < 150_000


def test_the_script_uses_routes_metrics_and_elements_that_exist() -> None:
    paths = re.findall(r'fetch\("([^"]+)"', OWN)
    assert len(paths) == OWN.count("fetch(") == 5
    assert {f"/{path}" for path in paths} <= {row.path for row in ROUTES + ADMIN_ROUTES}  # relative, for --root-path
    exported = {name.removeprefix("quire:") for name in exported_labels("quire")}
    named = re.findall(r'"(\w+_(?:total|seconds|perc|running|waiting|blocks|by_reason))"', OWN)
    assert len(set(named)) > 20
    assert {name for name in named if name not in exported and f"{name}_count" not in exported} == set()
    ids = re.findall(r'\bid="([\w-]+)"', MARKUP)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("([\w-]+)"\)', OWN)) <= set(ids)


def test_each_control_has_a_name() -> None:
    controls = re.findall(r"<(?:input|select|textarea)[^>]*\bid=\"([\w-]+)\"", MARKUP)
    assert controls == ["key", "models", "system", "temperature", "files", "text", "admin-key"]
    assert set(re.findall(r'<label for="([\w-]+)"', MARKUP)) == set(controls)
    assert all(text.strip() for text in re.findall(r"<button[^>]*>(.*?)</button>", MARKUP))
    assert set(re.findall(r'aria-(?:labelledby|describedby)="([\w-]+)"', MARKUP)) <= set(
        re.findall(r'id="([\w-]+)"', MARKUP)
    )


def test_the_page_of_the_routes_runs_its_own_script_and_needs_no_key(keyed: Any) -> None:
    answer = keyed.get("/docs")
    (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["script-src"] == source_of(script) and policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    markup = answer.text.replace(script, "")
    assert 'spec-url="openapi.json"' in markup and "//" not in markup  # relative, for --root-path
    assert "Mrinmoy Majumdar" in script and "Permission is hereby granted" in script
    assert keyed.get("/openapi.json").status_code == 200
