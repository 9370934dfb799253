"""A pytest plugin that runs one part of the collected tests, so that several processes can divide a file."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", default="0/1", help="run part I (from 0) of N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select a contiguous part: neighbouring tests compile the same kernels."""
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[len(items) * index // count : len(items) * (index + 1) // count]
