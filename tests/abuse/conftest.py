"""One server for every test of this folder that needs one. Whatever a test did to it, its canary is asked afterwards.

``app`` is a server's application without its processes: for what is refused before an engine sees it.
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


@pytest.fixture(scope="module")
def abused_app() -> Iterator[AbusedApp]:
    app = AbusedApp()
    yield app
    app.close()


@pytest.fixture
def app(abused_app: AbusedApp) -> Iterator[AbusedApp]:
    yield abused_app
    abused_app.check()
