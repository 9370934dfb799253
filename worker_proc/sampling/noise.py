"""One random number per sampled token, a pure function of the request's seed and the token's position.

So a request's tokens do not depend on its row, on the other requests of the batch, or on preemptions.
"""

import numpy as np
import numpy.typing as npt


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position).

    Two rounds of SplitMix64's finaliser (Steele et al., 2014).
    """
    z = _mix(seeds + np.uint64(0x9E3779B97F4A7C15) * (positions.astype(np.uint64) + np.uint64(1)))
    z = _mix(z ^ seeds)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
