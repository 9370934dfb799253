"""Invariants that involve requests, blocks and limits together."""

from quire.protocol.config import EngineConfig
from quire.scheduler_proc.core.request_table import RequestTable
from quire.scheduler_proc.kv.manager import KVCacheManager
from quire.scheduler_proc.requests.request import RequestStatus


def check_requests(table: RequestTable, kv: KVCacheManager, config: EngineConfig) -> None:
    """Raise AssertionError unless counters are within limits, and exactly the running requests hold blocks."""
    requests = table.requests.values()
    for request in requests:
        running = request.status is RequestStatus.RUNNING
        most = request.num_in_flight * (1 + config.num_speculative_tokens)
        assert 0 <= request.num_output_placeholders <= most, f"{request!r}: more placeholders than steps in flight"
        assert request.num_in_flight <= config.pipeline_depth, f"{request!r}: too many steps in flight"
        assert 0 <= request.num_acknowledged_tokens <= request.num_computed_tokens, f"{request!r}: not computed"
        held = kv.coordinator.managers[0].req_to_blocks.get(request.handle)
        assert bool(held) == running, f"{request!r}: holds blocks although not running, or the reverse"
    assert len(table.running) <= config.max_num_seqs
    live = {r.handle for r in requests}
    for manager in kv.coordinator.managers:
        assert manager.req_to_blocks.keys() <= live, "blocks are held by requests that have ended"
