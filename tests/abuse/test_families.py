"""Each family of abuse is tried in many forms, and the page of the suite says how many."""

from pathlib import Path

import pytest
from abuse_families import Source, families

FEWEST = 20
FAMILIES = families(Path(__file__).with_name("README.md").read_text("utf-8"))


def test_every_family_is_there() -> None:
    assert list(FAMILIES) == [f"A{number}" for number in range(1, 59)]


@pytest.mark.parametrize("number", FAMILIES)
def test_a_family_has_as_many_mutations_as_the_page_says(number: str) -> None:
    family = FAMILIES[number]
    assert len({source.test for source in family.sources}) == len(family.sources)
    assert [source.num_mutations() for source in family.sources] == [source.told for source in family.sources]
    assert sum(source.told for source in family.sources) == family.told >= FEWEST


@pytest.mark.parametrize(
    "source",
    [
        Source("test_json.py::test_that_is_not_there", 0),
        Source("test_routes.py::TestMatrix.test_that_is_not_there", 0),
        Source("test_json.py::test_what_is_no_json", 0, "VALUES"),
    ],
)
def test_what_is_not_tried_is_not_counted(source: Source) -> None:
    with pytest.raises(LookupError):
        source.num_mutations()


def test_parameters_are_counted_as_pytest_does() -> None:
    """Of a test with three marks, one of them on its class."""
    assert Source("test_routes.py::TestMatrix.test_an_upgrade_is_no_way_in", 0).num_mutations() == 10 * 6 * 2
