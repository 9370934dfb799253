"""One server for every test of this folder. Whatever a test did to it, its canary is looked at afterwards."""

from collections.abc import Iterator

import pytest
from abuse import AbusedServer


@pytest.fixture(scope="session")
def abused_server() -> Iterator[AbusedServer]:
    server = AbusedServer()
    yield server
    server.close()


@pytest.fixture
def server(abused_server: AbusedServer) -> Iterator[AbusedServer]:
    yield abused_server
    abused_server.check()
