"""A pytest plugin: runs one part of the tests that were collected, so that processes can share a file's kernels."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", default="0/1", help="only part I, from 0, of N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Neighbours stay together: they compile the same kernels."""
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[len(items) * index // count : len(items) * (index + 1) // count]
