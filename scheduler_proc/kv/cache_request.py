"""What this package sees of a request."""

from collections.abc import Sequence
from typing import Protocol

from quire.scheduler_proc.kv.events import Span


class CacheRequest(Protocol):
    """The view of a request that this package needs.

    Attributes:
        block_hashes: hashes of its known tokens, in units of ``KVCacheManager.block_size``.
        num_tokens: known tokens.
        num_computed_tokens: positions of all steps sent; 0 after a preemption.
        num_acknowledged_tokens: positions whose results have arrived, cache hits included; at most
            ``num_computed_tokens``, and 0 after a preemption.
        skip_reading_prefix_cache: whether all positions must be computed.
        account: the account whose share of the pool its blocks count for.
        span: returns its known tokens from index ``start`` up to ``end``; called only when events have them.
    """

    @property
    def handle(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_acknowledged_tokens(self) -> int: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def account(self) -> int: ...
    def span(self, start: int, end: int) -> Span: ...
