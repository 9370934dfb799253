"""Linear interpolation of measured times, along each axis."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np


class Curve:
    """Times as a function of one integer, tabulated up to ``top`` and extrapolated from the last two points beyond.

    Numbers below the first point have its time, because a kernel has a minimum time.
    """

    def __init__(self, points: Mapping[int, float], top: int) -> None:
        xs = sorted(points)
        ys = [points[x] for x in xs]
        self._top = max(top, xs[-1])
        self._slope = max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0) if len(xs) > 1 else 0.0
        inside = np.interp(np.arange(xs[-1] + 1), xs, ys)
        beyond = ys[-1] + self._slope * np.arange(1, self._top - xs[-1] + 1)
        self.values: list[float] = np.concatenate([inside, beyond]).tolist()

    def at(self, x: int) -> float:
        if x <= self._top:
            return self.values[x]
        return self.values[-1] + self._slope * (x - self._top)


class Grid:
    """Times as a function of two or more numbers, on a grid with missing points.

    Missing points are interpolated along the axes, the last axis first, because times are nearly linear in each. Below
    the first value of an axis the first value is used; beyond the last, the last two are extrapolated.
    """

    def __init__(self, points: Mapping[tuple[int, ...], float]) -> None:
        self._axes = [sorted({point[axis] for point in points}) for axis in range(len(next(iter(points))))]
        places = [{x: place for place, x in enumerate(axis)} for axis in self._axes]
        values = np.full([len(axis) for axis in self._axes], np.nan)
        for point, value in points.items():
            values[tuple(places[axis][x] for axis, x in enumerate(point))] = value
        _fill(values, self._axes)
        self._values: list[float] = values.ravel().tolist()
        self._strides = [int(np.prod(values.shape[axis + 1 :])) for axis in range(values.ndim)]
        self._floor = float(values.min())

    def at(self, *x: float) -> float:
        """Return the time at ``x``, one number per axis."""
        return self._along(self._corners(x[:-1]), x[-1])

    def at_both(self, x: Sequence[float], last: float, other: float) -> tuple[float, float]:
        """Return the times at two values of the last axis, for less than twice the work; ``x`` has the other axes."""
        corners = self._corners(x)
        return self._along(corners, last), self._along(corners, other)

    def _corners(self, x: Sequence[float]) -> list[tuple[int, float]]:
        """Return (offset, weight) of the lines along the last axis that surround ``x``."""
        corners = [(0, 1.0)]
        for axis, stride, number in zip(self._axes, self._strides, x, strict=False):
            place, weight = _place(axis, number)
            base = place * stride
            if weight == 0.0:
                corners = [(offset + base, share) for offset, share in corners]
            else:
                far, rest = base + stride, 1.0 - weight
                near = [(offset + base, share * rest) for offset, share in corners]
                corners = near + [(offset + far, share * weight) for offset, share in corners]
        return corners

    def _along(self, corners: Sequence[tuple[int, float]], number: float) -> float:
        values, total = self._values, 0.0
        place, weight = _place(self._axes[-1], number)
        if weight == 0.0:
            for offset, share in corners:
                total += values[offset + place] * share
        else:
            rest = 1.0 - weight
            for offset, share in corners:
                at = offset + place
                total += (values[at] * rest + values[at + 1] * weight) * share
        return total if total > self._floor else self._floor


def _place(axis: Sequence[int], number: float) -> tuple[int, float]:
    """Return the index before ``number`` on an axis and the relative distance to the next; above 1 beyond the end."""
    if number <= axis[0] or len(axis) == 1:
        return 0, 0.0
    place = min(bisect_right(axis, number), len(axis) - 1) - 1
    return place, (number - axis[place]) / (axis[place + 1] - axis[place])


def _fill(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", axes: Sequence[Sequence[int]]) -> None:
    """Replace each nan by interpolation along an axis: first lines with two or more known points, then with one."""
    for least in (2, 1):
        for axis in reversed(range(values.ndim)):
            lines = np.moveaxis(values, axis, -1)
            for index in np.ndindex(lines.shape[:-1]):
                _fill_line(lines[index], axes[axis], least)
            if not np.isnan(values).any():
                return


def _fill_line(line: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", axis: Sequence[int], least: int) -> None:
    """Fill the nans of a line in place, unless it has fewer than ``least`` known points."""
    known = np.flatnonzero(~np.isnan(line))
    if len(known) < least or len(known) == len(line):
        return
    xs = np.asarray(axis, float)
    gaps = np.isnan(line)
    filled = np.interp(xs, xs[known], line[known])
    last = known[-1]
    if len(known) > 1:
        before = known[-2]
        slope = max((line[last] - line[before]) / (xs[last] - xs[before]), 0.0)
        filled[last + 1 :] = line[last] + slope * (xs[last + 1 :] - xs[last])
    line[gaps] = filled[gaps]
