"""The table of families in README.md: every family is listed with its number of mutations."""

from pathlib import Path

import pytest
from abuse_families import Source, families

MIN_MUTATIONS = 20
FAMILIES = families(Path(__file__).with_name("README.md").read_text("utf-8"))


def test_all_families_are_listed() -> None:
    assert list(FAMILIES) == [f"A{number}" for number in range(1, 63)]


@pytest.mark.parametrize("number", FAMILIES)
def test_mutation_counts_match_the_readme(number: str) -> None:
    family = FAMILIES[number]
    assert len({source.test for source in family.sources}) == len(family.sources)
    assert [source.num_mutations() for source in family.sources] == [source.stated for source in family.sources]
    assert sum(source.stated for source in family.sources) == family.stated >= MIN_MUTATIONS


@pytest.mark.parametrize(
    "source",
    [
        Source("test_json.py::test_missing", 0),
        Source("test_routes.py::TestMatrix.test_missing", 0),
        Source("test_json.py::test_invalid_json", 0, "VALUES"),
    ],
)
def test_unused_lists_are_an_error(source: Source) -> None:
    with pytest.raises(LookupError):
        source.num_mutations()


def test_parameters_are_counted_as_pytest_does() -> None:
    """For a test with three parametrize marks, one of them on its class."""
    assert Source("test_routes.py::TestMatrix.test_upgrade_is_ignored", 0).num_mutations() == 31 * 6 * 2
