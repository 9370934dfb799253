"""A batch whose tokens a test sets, for proposers."""

import numpy as np

from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.worker_messages import NewRequestData
from quire.worker_proc.batch.input_batch import InputBatch


class DraftBatch:
    """Requests by handle, with prompts and output tokens that the host knows."""

    def __init__(self, max_rows: int = 4, max_len: int = 64) -> None:
        self.batch = InputBatch(max_rows, max_len)

    def change(self, removed: list[int], new: dict[int, list[int]], **sampling: object) -> None:
        """``new``: handle → prompt; a request's seed is its handle. ``sampling``: the parameters of all requests."""
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        requests = [NewRequestData(h, f"r{h}", len(p), len(p), 0, [1], params, h) for h, p in new.items()]
        tokens = np.array([token for prompt in new.values() for token in prompt], np.int32)
        self.batch.change_rows(removed, requests, tokens)
        self.batch.builder.reset()

    def extend(self, handle: int, tokens: list[int]) -> None:
        """Append ``tokens`` to the output of the request."""
        row, column = self.batch.row(handle), self.batch.tokens
        start = int(column.length[row])
        column.data[row, start : start + len(tokens)] = tokens
        column.length[row] += len(tokens)
        self.batch.num_known[row] = column.length[row]

    def text(self, handle: int) -> list[int]:
        row = self.batch.row(handle)
        known: list[int] = self.batch.tokens.data[row, : self.batch.tokens.length[row]].tolist()
        return known
