"""Each family of abuse is tried in many forms, and the page of the suite says how many."""

from pathlib import Path
from typing import Any

import pytest
from abuse_families import FAMILIES, Source, table

FEWEST = 20
PAGE = Path(__file__).with_name("README.md")


def test_every_family_is_there() -> None:
    assert list(FAMILIES) == [f"A{number}" for number in range(1, 59)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_enough_mutations(family: str) -> None:
    _, sources = FAMILIES[family]
    assert len({source.test for source in sources}) == len(sources)
    assert sum(source.num_mutations() for source in sources) >= FEWEST


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text("utf-8"), "print abuse_families.table() into the page"


@pytest.mark.parametrize(
    "source",
    [
        Source("abuse/test_json.py::test_that_is_not_there"),
        Source("abuse/test_routes.py::TestMatrix.test_that_is_not_there"),
        Source("abuse/test_json.py::test_what_is_no_json", lambda m: len(m.VALUES)),
    ],
)
def test_what_is_not_tried_is_not_counted(source: Any) -> None:
    with pytest.raises(LookupError):
        source.num_mutations()


def test_parameters_are_counted_as_pytest_does() -> None:
    """Of a test with three marks, one of them on its class."""
    name = "abuse/test_routes.py::TestMatrix.test_an_upgrade_is_no_way_in"
    assert Source(name).num_mutations() == 10 * 6 * 2
