"""Array types of messages. Arrays are sent as raw bytes, so no process converts tokens to Python integers."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]

NO_TOKENS: Int32 = np.zeros(0, np.int32)
