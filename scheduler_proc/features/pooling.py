"""Pooling: requests whose prompt is turned into vectors or scores. They generate nothing."""

from typing import Any

import msgspec

from quire.protocol.request.pooling_params import NO_SAMPLING
from quire.protocol.wire.side_rows import MAX_SIDE_BYTES, POOLED
from quire.protocol.wire.worker_messages import NewRequestData
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.features.result_bytes import POOLING, ROW_BYTES
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.messages.results import DueRows
from quire.scheduler_proc.messages.steps import StepRow
from quire.scheduler_proc.requests.request import Request


class Pooling(Feature):
    """Checks pooled requests against what the model can do, and sets them up."""

    name = "pooling"

    def __init__(self, core: Core) -> None:
        self._model = core.config.model

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        """Raise Refusal unless the model does what the request asks for, and the rows of a pooled one are not too many.

        ``num_prompt_tokens``: of a pooled request.
        """
        params, can = event.pooling, self._model.pooling
        delivered = getattr(event, "output_token_ids", None)  # not in a trace
        tasks = "none" if can is None else ", ".join(can.tasks)
        if params is None:
            if not self._model.generates:
                raise Refusal("unsupported", "", f"this model cannot generate tokens; its pooling tasks: {tasks}")
            return
        if can is None or params.task not in can.tasks:
            raise Refusal("unsupported", "task", f"this model cannot {params.task}; its pooling tasks: {tasks}")
        if delivered is not None and len(delivered):
            text = f"a request with pooling has no output (got {len(delivered)} tokens)"
            raise Refusal("invalid_value", "output_token_ids", text)
        if params.dimensions and params.task == "classify":
            text = f"dimensions cannot be combined with task classify (got {params.dimensions})"
            raise Refusal("invalid_value", "dimensions", text)
        if params.dimensions and (allowed := can.dimensions_allowed(params.dimensions)):
            raise Refusal("invalid_value", "dimensions", f"dimensions must be {allowed} (got {params.dimensions})")
        num_rows = num_prompt_tokens if params.task == "token_embed" else 1
        num_bytes = 4 * num_rows * can.width(params.task, params.dimensions)
        if num_bytes > MAX_SIDE_BYTES:
            text = (
                f"the vectors of {num_rows} tokens have {num_bytes} bytes, more than the {MAX_SIDE_BYTES} that a "
                "request may have: shorten the prompt or lower dimensions"
            )
            raise Refusal("invalid_value", "prompt", text)

    def ends_with_prompt(self, event: Any) -> bool:
        return event.pooling is not None

    def check_parent(self, event: Any, parent: Request) -> None:
        if event.pooling is not None or not parent.generates:
            text = "forked_from cannot be combined with pooling, neither of this request nor of the one to fork"
            raise Refusal("unsupported_value", "forked_from", text)

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        pooling, can = None if event is None else event.pooling, self._model.pooling
        if pooling is None:
            return
        POOLING.put(request, pooling)
        request.generates, request.sampling, request.stop_tokens = False, NO_SAMPLING, frozenset()
        request.max_total_tokens = request.num_prompt_tokens + 1  # the placeholder of the vector
        if can is not None:
            needs_all = can.needs_every_token(pooling.task)
            request.skip_reading_prefix_cache = pooling.skip_reading_prefix_cache or needs_all
            ROW_BYTES.put(request, 4 * can.width(pooling.task, pooling.dimensions))

    def building(self, request: Request, data: NewRequestData) -> NewRequestData:
        return data if request.generates else msgspec.structs.replace(data, pooling=POOLING.of(request))

    def due_rows(self, row: StepRow) -> DueRows | None:
        params, width = POOLING.of(row.request), ROW_BYTES.of(row.request) // 4
        if params is not None and params.task == "token_embed":
            return DueRows(POOLED, width, row.first, row.first + row.num_tokens)
        return DueRows(POOLED, width, 0, 1) if row.completes else None
