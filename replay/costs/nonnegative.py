"""Least squares with non-negative coefficients."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the ``x >= 0`` that minimises ``|matrix @ x - target|``.

    This is the active set method of Lawson and Hanson (Solving Least Squares Problems, 1974), applied to the triangle
    of a QR decomposition.

    Args:
        matrix: float64 ``[rows, columns]`` with rows >= columns; the columns are of similar magnitude.
        target: float64 ``[rows]``.

    Returns:
        float64 ``[columns]``; exactly 0 for unused columns.
    """
    orthogonal, triangle = np.linalg.qr(matrix)
    right = orthogonal.T @ target
    num_columns = triangle.shape[1]
    solution = np.zeros(num_columns)
    used = np.zeros(num_columns, bool)
    least = 1e-10 * np.linalg.norm(triangle) * np.linalg.norm(right)
    for _ in range(10 * num_columns):
        gain = triangle.T @ (right - triangle @ solution)
        gain[used] = -np.inf
        best = int(gain.argmax())
        if gain[best] <= least:
            break
        used[best] = True
        solution, used = _settle(triangle, right, solution, used)
    return solution


def _settle(
    triangle: Floats, right: Floats, solution: Floats, used: npt.NDArray[np.bool_]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Move from ``solution`` to the optimum of the ``used`` columns; drop columns that would become negative."""
    while True:
        trial = np.zeros_like(solution)
        trial[used] = np.linalg.lstsq(triangle[:, used], right, rcond=None)[0]
        low = used & (trial <= 0)
        if not low.any():
            return trial, used
        way = np.min(solution[low] / np.maximum(solution[low] - trial[low], 1e-300))
        solution = solution + way * (trial - solution)
        used = used & (solution > 1e-14 * solution.max(initial=0.0)) & ~(low & (solution <= 0))
        solution = np.where(used, solution, 0.0)
