"""Types of the arrays in messages. They travel as raw bytes, so that no side turns tokens into Python integers."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]
Float32: TypeAlias = npt.NDArray[np.float32]
