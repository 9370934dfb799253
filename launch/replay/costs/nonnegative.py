"""Least squares where no coefficient may be negative."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The ``x >= 0`` for which ``matrix @ x`` is nearest to ``target``: the active set method of Lawson and Hanson
    (Solving Least Squares Problems, 1974), on the triangle of a QR decomposition.

    Args:
        matrix: float64 ``[rows, columns]``, with at least as many rows as columns; its columns of like size.
        target: float64 ``[rows]``.

    Returns:
        float64 ``[columns]``; 0 exactly where a column is not used.
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
    """From ``solution`` towards the best one with the ``used`` columns; those that would become negative go."""
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
