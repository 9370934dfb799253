"""Token stores: the known tokens of a request and the hashes of its full blocks."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from quire.protocol.block_hash import HashChain
from quire.protocol.wire.arrays import NO_TOKENS, Int32


class TokenStore(Protocol):
    """Known tokens of a request, prompt then output, with the hashes of its full blocks."""

    block_hashes: list[bytes]

    def __len__(self) -> int: ...

    def append(self, token: int) -> None: ...

    def extend(self, raw: bytes) -> None:
        """Append the tokens in ``raw``, little-endian int32."""
        ...

    def array(self) -> Int32:
        """Return a copy of all known tokens."""
        ...

    def tail(self, start: int, end: int | None = None) -> list[int]:
        """Return the known tokens from index ``start`` on, or up to ``end``, without copying the others."""
        ...

    @property
    def salts(self) -> tuple[str, ...]:
        """What its hashes cover besides tokens and the adapter; see ``BlockHasher.chain``."""
        ...

    def fork(self, num_tokens: int) -> "TokenStore":
        """Return a store with the first ``num_tokens`` tokens, which nothing follows."""
        ...

    def follow(self, on_full_block: Callable[[bytes], None]) -> None:
        """Call ``on_full_block`` with the hash of each block that becomes full after this call."""
        ...


class Tokens:
    """Token store with the token ids themselves, as little-endian int32."""

    __slots__ = ("_chain", "_data", "_on_full_block", "block_hashes")

    def __init__(self, known: Int32, chain: HashChain | None) -> None:
        """``chain``: a new chain that computes the block hashes, or None without prefix caching."""
        self._on_full_block: Callable[[bytes], None] | None = None
        self._data = bytearray(np.ascontiguousarray(known, "<i4").data.cast("B") if len(known) else b"")
        self._chain = chain
        self.block_hashes: list[bytes] = [] if chain is None else chain.hashes
        if chain is not None:
            chain.extend(self._data)

    def __len__(self) -> int:
        return len(self._data) >> 2

    def follow(self, on_full_block: Callable[[bytes], None]) -> None:
        self._on_full_block = on_full_block

    def append(self, token: int) -> None:
        self.extend(token.to_bytes(4, "little"))

    def extend(self, raw: bytes) -> None:
        self._data += raw
        if self._chain is None:
            return
        if self._on_full_block is None:
            self._chain.extend(self._data, raw)
            return
        known = len(self.block_hashes)
        self._chain.extend(self._data, raw)
        for name in self.block_hashes[known:]:
            self._on_full_block(name)

    def array(self) -> Int32:
        return np.frombuffer(bytes(self._data), "<i4")

    def tail(self, start: int, end: int | None = None) -> list[int]:
        tail: list[int] = np.frombuffer(self._data[4 * start : None if end is None else 4 * end], "<i4").tolist()
        return tail

    @property
    def salts(self) -> tuple[str, ...]:
        return () if self._chain is None else self._chain.salts

    def fork(self, num_tokens: int) -> "Tokens":
        made = Tokens(NO_TOKENS, None)
        made._data = self._data[: 4 * num_tokens]
        if self._chain is not None:
            made._chain = self._chain.fork(made._data)
            made.block_hashes = made._chain.hashes
        return made
