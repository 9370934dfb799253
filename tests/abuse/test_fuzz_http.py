"""A short run of the HTTP fuzzer with fixed seeds; ``tests/nightly/acceptance/fuzz_http.py`` is the long one."""

import pytest
from abuse import AbusedServer
from http_fuzzer import check_answer, fuzz
from http_mutations import RIGHT, make_case

pytestmark = pytest.mark.full

NUM_CASES = 100


@pytest.mark.full
def test_mutated_requests(server: AbusedServer) -> None:
    counts = fuzz(server, (f"default:{number}" for number in range(NUM_CASES)))
    assert counts.requests == NUM_CASES
    assert counts.by_status[200] > 0 and counts.by_status[400] > NUM_CASES / 3, counts


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_base_requests_are_valid(server: AbusedServer, number: int) -> None:
    """If a base request were refused, its mutations would test nothing else."""
    path, body = RIGHT[number]
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    check_answer(response)


def test_cases_differ_and_are_reproducible() -> None:
    cases = [make_case(f"x:{number}") for number in range(500)]
    assert cases == [make_case(f"x:{number}") for number in range(500)]
    assert len({case.content for case in cases}) > 450
    assert {path for path, _ in RIGHT} == {case.path for case in cases}
    assert len({how for case in cases for how in case.how}) >= 10
