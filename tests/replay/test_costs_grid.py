"""Interpolation of measured times: exact at measured points, linear between them, and filled corners."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.replay.costs.grid import Curve, Grid

POINTS = {2: 10.0, 4: 14.0, 10: 50.0}


class TestCurve:
    @pytest.mark.parametrize(
        ("x", "y"),
        [(0, 10.0), (1, 10.0), (2, 10.0), (3, 12.0), (4, 14.0), (7, 32.0), (10, 50.0), (12, 62.0), (99, 584.0)],
    )
    @pytest.mark.parametrize("top", [1, 11, 50])
    def test_interpolates_and_extrapolates_above_the_first_point(self, x: int, y: float, top: int) -> None:
        assert Curve(POINTS, top).at(x) == pytest.approx(y)

    def test_extrapolation_does_not_decrease(self) -> None:
        assert Curve({1: 5.0, 2: 4.0}, 1).at(100) == 4.0
        assert Curve({3: 5.0}, 10).at(1) == Curve({3: 5.0}, 10).at(100) == 5.0


def plane(x: float, y: float, z: float) -> float:
    """Return a function that is linear in each of three numbers."""
    return 5 + 2 * x + 3 * y + x * y + 0.5 * z


AXES = ([1, 4, 16], [0, 8, 32], [16, 64, 256, 1024])
ALL = {point: plane(*point) for point in itertools.product(*AXES)}


class TestGrid:
    @settings(max_examples=60, deadline=None)
    @given(x=st.floats(1, 40), y=st.floats(0, 80), z=st.floats(16, 5000))
    def test_reproduces_linear_functions(self, x: float, y: float, z: float) -> None:
        assert Grid(ALL).at(x, y, z) == pytest.approx(plane(x, y, z))

    @settings(max_examples=60, deadline=None)
    @given(x=st.floats(0, 40), y=st.floats(0, 80), a=st.floats(0, 5000), b=st.floats(0, 5000))
    def test_at_both_equals_two_lookups(self, x: float, y: float, a: float, b: float) -> None:
        grid = Grid(ALL)
        assert grid.at_both((x, y), a, b) == (grid.at(x, y, a), grid.at(x, y, b))

    def test_uses_first_value_below_it(self) -> None:
        assert Grid(ALL).at(0, 0, 1) == plane(1, 0, 16)

    def test_fills_missing_corners_along_the_axes(self) -> None:
        """Profiles lack the largest batches at the longest contexts, which do not fit into memory."""
        some = {point: value for point, value in ALL.items() if point[0] * point[2] <= 2048}
        assert len(some) < len(ALL)
        grid = Grid(some)
        for point, value in ALL.items():
            assert grid.at(*point) == pytest.approx(value), point

    def test_single_known_point_fills_its_line(self) -> None:
        grid = Grid({(1, 1): 3.0, (2, 5): 4.0})
        assert grid.at(1, 5) == 3.0 and grid.at(2, 1) == 4.0

    def test_is_never_below_the_measured_minimum(self) -> None:
        falling = Grid({(1,): 9.0, (2,): 5.0, (4,): 4.0})
        assert falling.at(1000) == 4.0
