"""The names of a prompt's blocks, by which the router finds the engine that has them cached."""

import asyncio

from quire.protocol.block_hash import BlockHasher
from quire.protocol.config import EngineConfig
from quire.protocol.routing import KEY_BYTES
from quire.protocol.wire.front_end_messages import AddRequest
from quire.protocol.wire.item_messages import features_of

TOKENS_AT_ONCE = 8192
"""Tokens that are hashed before other work of the event loop gets its turn."""


class BlockKeys:
    """Hashes prompts exactly as ``scheduler_proc/core/admission.py`` does. Owns the memo of long prefixes."""

    def __init__(self, config: EngineConfig) -> None:
        self._algorithm = config.prefix_caching_hash_algo
        self._is_by_tenant = config.isolate_prefix_cache_by_key
        self._hasher: BlockHasher | None = None

    async def of(self, request: AddRequest, block_size: int) -> bytes:
        """Return ``Route.keys``: KEY_BYTES for each full block of the prompt.

        They are empty for a request that cannot use what is cached.

        Args:
            block_size: tokens per block; 0 if it is not known yet.
        """
        if not block_size or request.sampling.prompt_logprobs is not None:
            return b""
        if self._hasher is None or self._hasher.block_size != block_size:
            self._hasher = BlockHasher(self._algorithm, block_size)
        digest = "" if request.adapter is None else request.adapter.digest.hex()
        tenant = request.tenant if self._is_by_tenant else 0
        chain = self._hasher.chain(request.cache_salt, digest, features_of(request.items), tenant=tenant)
        tokens = request.prompt_token_ids.astype("<i4", copy=False).tobytes()
        for end in range(4 * TOKENS_AT_ONCE, len(tokens), 4 * TOKENS_AT_ONCE):
            chain.extend(tokens[:end])
            await asyncio.sleep(0)
        chain.extend(tokens)
        return b"".join([each[:KEY_BYTES] for each in chain.hashes])
