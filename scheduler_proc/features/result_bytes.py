"""Result bytes: the room that the result of a step has for vectors and routed experts."""

from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.side_rows import MAX_STEP_SIDE_BYTES
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.messages.steps import StepRow
from quire.scheduler_proc.requests.reasons import WaitReason
from quire.scheduler_proc.requests.request import Request, RequestPart

_NO_LIMIT = 2**62
POOLING = RequestPart[PoolingParams | None]("pooling", None)
"""What the prompt of a request is turned into."""
ROW_BYTES = RequestPart("row_bytes", 0)
"""Bytes that a result has for each computed position, beside tokens: vectors or routed experts."""


class ResultBytes(Feature):
    """Rations the bytes of a result between the rows of a step. The few of decoding requests do not count."""

    name = "result_bytes"

    def __init__(self, core: Core) -> None:
        config = core.config
        self.is_enabled = config.model.pooling is not None or config.enable_return_routed_experts

    def budget(self) -> "StepBytes":
        return StepBytes()


class StepBytes:
    """The bytes of one step."""

    reason = WaitReason.RESULT_SIZE

    def __init__(self) -> None:
        self._left = MAX_STEP_SIDE_BYTES
        self._taken: dict[int, int] = {}

    def left(self, request: Request, num_computed: int) -> int:
        if not (row_bytes := ROW_BYTES.of(request)):
            return _NO_LIMIT
        rows = self._left // row_bytes - _num_reported(request, num_computed)
        return _NO_LIMIT if _is_one_row(request) and rows > 0 else rows

    def take(self, row: StepRow) -> None:
        request = row.request
        if row_bytes := ROW_BYTES.of(request):
            count = 1 if _is_one_row(request) else row.num_tokens + _num_reported(request, request.num_computed_tokens)
            self._taken[request.handle] = count * row_bytes
            self._left -= count * row_bytes

    def give_back(self, row: StepRow) -> None:
        self._left += self._taken.pop(row.request.handle, 0)


def _is_one_row(request: Request) -> bool:
    params = POOLING.of(request)
    return params is not None and params.task != "token_embed"


def _num_reported(request: Request, num_computed: int) -> int:
    """Return how many computed positions are in the result: a new row with routed experts reports them too."""
    return num_computed if request.generates and not request.on_worker else 0
