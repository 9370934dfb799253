"""Routed experts: requests whose results name the experts that computed each position."""

from typing import Any

from quire.protocol.config import EngineConfig
from quire.protocol.wire.side_rows import MAX_SIDE_BYTES
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.features.result_bytes import ROW_BYTES
from quire.scheduler_proc.messages.arrivals import Refusal
from quire.scheduler_proc.requests.request import Request


class RoutedExpertRows(Feature):
    """Limits requests to what their results can hold."""

    name = "routed_experts"

    def __init__(self, core: Core) -> None:
        self._config = core.config

    def prepare(self, request: Request, event: Any, parent: Request | None) -> None:
        if event is not None and request.sampling.return_routed_experts:
            ROW_BYTES.put(request, routed_row_bytes(request.max_total_tokens, self._config))


def routed_row_bytes(num_tokens: int, config: EngineConfig) -> int:
    """Return the bytes of the experts of one position of a request with ``num_tokens`` of prompt and output at most.

    Raises:
        Refusal: it cannot get them.
    """
    name, moe = "return_routed_experts", config.model.moe
    if moe is None or not config.enable_return_routed_experts:
        text = f"{name} needs an engine that keeps them: start it with --enable-return-routed-experts"
        raise Refusal("unsupported_value", name, text)
    row_bytes = 4 * len(moe.layers) * moe.num_experts_per_token
    most = MAX_SIDE_BYTES // row_bytes
    if num_tokens > most:
        text = (
            f"with {name}, prompt and output together must have at most {most} tokens for this model "
            f"(got up to {num_tokens}): lower max_tokens or shorten the prompt"
        )
        raise Refusal("invalid_value", name, text)
    return row_bytes
