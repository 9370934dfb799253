"""Fixtures: ``server`` is one running server, checked with a canary request after each test that uses it.

``app`` is the application without processes, for input that is refused before it reaches the engine.
"""

from collections.abc import Iterator

import pytest
from abuse import AbusedServer
from abused_app import AbusedApp


@pytest.fixture(scope="session")
def abused_server() -> Iterator[AbusedServer]:
    server = AbusedServer()
    yield server
    server.close()


@pytest.fixture
def server(abused_server: AbusedServer) -> Iterator[AbusedServer]:
    yield abused_server
    abused_server.check()


@pytest.fixture(scope="session")
def abused_app() -> Iterator[AbusedApp]:
    app = AbusedApp()
    yield app
    app.close()


@pytest.fixture
def app(abused_app: AbusedApp) -> Iterator[AbusedApp]:
    yield abused_app
    abused_app.check()
