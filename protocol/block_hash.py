"""Block hashes: one running hash over the tokens of a request, read at the end of each block.

The hash of a block covers its tokens (little-endian int32), all tokens before it, and a root made of adapter and cache
salt. Equal hashes therefore mean equal prefixes, in every process and on every machine. Requests with different salts
or adapters share no hash. The inner state of the hash function is the chain: reading a digest after each block costs
less than hashing every block together with its parent's digest.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import islice
from typing import NamedTuple, Protocol

from xxhash import xxh3_128

from quire.protocol.errors import ConfigError

SHORT_HASH_BYTES = 8
"""Bytes of a hash that traces keep. Among 2**30 blocks, two share 8 bytes of SHA-256 with probability 1 in 37."""

_PLAIN = b"quire block chain 2\0"
_SALTED = b"quire salted block chain 2\0"
_TENANT = b"quire tenant's block chain 2\0"
_FEATURE = b"quire block feature 2\0"

CHUNK_BLOCKS = 64
"""Blocks per entry of the memo."""


class _Hash(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> "_Hash": ...


def hash_algorithm(name: str) -> Callable[[], _Hash]:
    """Return the constructor of a running hash for the algorithm ``sha256`` or ``xxh3_128``.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "sha256":
        return sha256
    if name != "xxh3_128":
        raise ConfigError(f"prefix_caching_hash_algo must be sha256 or xxh3_128 (got {name!r})")
    return xxh3_128


class InputFeature(NamedTuple):
    """Non-token input at a range of positions, such as an image, identified by the hash of its content."""

    offset: int
    length: int
    content_hash: bytes


class HashMemo:
    """LRU cache of the hashes of long prefixes, so that the next turn of a conversation hashes only its new tokens.

    An entry is a chunk of CHUNK_BLOCKS blocks, stored under the hash of its last block. Hashing a whole chunk costs a
    tenth of hashing its blocks one by one. The lookup is exact, because the hash covers the whole prefix.
    """

    def __init__(self, max_chunks: int = 4096) -> None:
        self._chunks: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        self._max_chunks = max_chunks

    def find(self, last_hash: bytes) -> tuple[bytes, ...] | None:
        found = self._chunks.get(last_hash)
        if found is not None:
            self._chunks.move_to_end(last_hash)
        return found

    def store(self, hashes: Sequence[bytes]) -> None:
        self._chunks[hashes[-1]] = tuple(hashes)
        if len(self._chunks) > self._max_chunks:
            self._chunks.popitem(last=False)

    def __len__(self) -> int:
        return len(self._chunks)


class BlockHasher:
    """Makes hash chains: owns the algorithm, the block size and the memo that all chains share."""

    def __init__(self, algorithm: str, block_size: int, memo: HashMemo | None = None) -> None:
        """``block_size``: tokens per hash. Raises ConfigError when the algorithm is unknown or not installed."""
        self.block_size = block_size
        self.memo = HashMemo() if memo is None else memo
        self._new = hash_algorithm(algorithm)
        self.hash_bytes = len(self._new().digest())

    def chain(
        self, cache_salt: str = "", adapter: str = "", features: Sequence[InputFeature] = (), *, tenant: int = 0
    ) -> "HashChain":
        """Return an empty chain. Only requests with the same salt, adapter and tenant can share a hash of it.

        ``tenant``: 0 when tenants share the prefix cache.
        """
        state = self._new()
        if cache_salt or adapter or tenant:
            salt, name = cache_salt.encode(), adapter.encode()
            # Each kind of root begins with a byte of its own, and lengths stand before texts: no salt, adapter or
            # tenant can be written so that it equals another one, which would let one tenant find another's contents.
            kind = _TENANT + tenant.to_bytes(4, "little") if tenant else _SALTED
            state.update(kind + len(salt).to_bytes(4, "little") + salt + name)
            root = state.digest()  # fixed length, so that a salt cannot imitate tokens
            state = self._new()
            state.update(_SALTED + root)
        else:
            state.update(_PLAIN)
        salts = (*((cache_salt,) if cache_salt else ()), *((f"tenant-{tenant}",) if tenant else ()))
        return HashChain(self, state, tuple(sorted(features)), salts)

    def restart(self, digest: bytes, extra: bytes) -> _Hash:
        """Return a running hash that continues from ``digest`` with ``extra``, which tokens cannot imitate."""
        state = self._new()
        state.update(_FEATURE + len(extra).to_bytes(4, "little") + extra + digest)
        return state


class HashChain:
    """The block hashes of one request. Append-only. ``salts``: what keeps its contents apart, besides the adapter."""

    __slots__ = ("_features", "_features_end", "_hasher", "_root", "_size", "_state", "hashes", "salts")

    def __init__(
        self, hasher: BlockHasher, state: _Hash, features: tuple[InputFeature, ...], salts: tuple[str, ...]
    ) -> None:
        self._hasher = hasher
        self._size = 4 * hasher.block_size
        self._root, self._state = state, state.copy()
        self._features, self.salts = features, salts
        self._features_end = 4 * max((each.offset + each.length for each in features), default=0)
        self.hashes: list[bytes] = []

    def fork(self, data: bytes | bytearray) -> "HashChain":
        """Return a chain over ``data``, the first tokens of this one, that continues separately.

        If it has as many full blocks, nothing is hashed.
        """
        if len(data) // self._size < len(self.hashes):
            made = HashChain(self._hasher, self._root.copy(), self._features, self.salts)
            made.extend(data)
            return made
        made = HashChain(self._hasher, self._state.copy(), self._features, self.salts)
        made._root, made.hashes = self._root, self.hashes.copy()
        return made

    def extend(self, data: bytes | bytearray, added: bytes = b"") -> None:
        """Hash the blocks that ``data`` has completed since the last call.

        Args:
            data: all tokens of the request, as bytes.
            added: the bytes just appended to ``data``. When they are exactly one block, no copy is made.
        """
        size = self._size
        start = len(self.hashes) * size
        missing = len(data) - start
        if missing < size:
            return
        # The case of a decoding request, once in ``block_size`` steps.
        if missing == size == len(added) and start >= self._features_end:
            self._state.update(added)
            self.hashes.append(self._state.digest())
            return
        if start < self._features_end:
            start = self._extend_with_features(data, size)
        if len(data) - start >= size * CHUNK_BLOCKS:
            start = self._extend_by_chunks(data, size)
        self._append_blocks(bytes(memoryview(data)[start:]), size)

    def _append_blocks(self, raw: bytes, size: int) -> None:
        """Hash the whole blocks in ``raw``. Mapping ``update`` in C takes a sixth less time than a Python loop."""
        update, digest = self._state.update, self._state.digest
        blocks = [raw[at : at + size] for at in range(0, len(raw) - size + 1, size)]
        self.hashes += [digest() for _ in map(update, blocks)]

    def _extend_by_chunks(self, data: bytes | bytearray, size: int) -> int:
        """Hash whole chunks, using the memo. Returns the byte offset after the last chunk."""
        memo, chunk = self._hasher.memo, size * CHUNK_BLOCKS
        view = memoryview(data)
        at, known = len(self.hashes) * size, True
        while at + chunk <= len(data):
            # A running hash cannot go back, and a chunk that the memo has not must be hashed again block by block.
            before = self._state.copy() if known else self._state
            if known:
                self._state.update(view[at : at + chunk])
                found = memo.find(self._state.digest())
                if found is not None:
                    self.hashes += found
                    at += chunk
                    continue
                known = False  # the memo is unlikely to have a longer prefix
                self._state = before
            first = len(self.hashes)
            self._append_blocks(bytes(view[at : at + chunk]), size)
            memo.store(self.hashes[first:])
            at += chunk
        return at

    def _extend_with_features(self, data: bytes | bytearray, size: int) -> int:
        """Hash the blocks up to the end of the last feature; of those that overlap one, the content hash and its offset
        in the block are hashed too. Returns the byte offset after them."""
        tokens, at, ended = size // 4, len(self.hashes) * size, 0
        while at < self._features_end and at + size <= len(data):
            first = at // 4
            # Features are in order: those that begin behind the block are not looked at, and those before it not again.
            while ended < len(self._features) and sum(self._features[ended][:2]) <= first:
                ended += 1
            extra = b""
            for f in islice(self._features, ended, None):
                if f.offset >= first + tokens:
                    break
                if f.offset + f.length > first:
                    place = (f.offset - first).to_bytes(8, "little", signed=True)
                    extra += len(f.content_hash).to_bytes(4, "little") + f.content_hash + place
            if extra:
                self._state = self._hasher.restart(self._state.digest(), extra)
            self._state.update(data[at : at + size])
            self.hashes.append(self._state.digest())
            at += size
        return at


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the cache key of a block in one KV group: groups store different data for the same tokens."""
    return block_hash + group_suffix(group)


def group_suffix(group: int) -> bytes:
    """Return the end of a group's cache keys; that of group 0 is empty."""
    return group.to_bytes(2, "little") if group else b""


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return the hash and the group of a cache key. Hashes have a multiple of eight bytes."""
    size = len(key) // 8 * 8
    return key[:size], int.from_bytes(key[size:], "little")


def split_keys(keys: Sequence[bytes]) -> tuple[bytes, list[int] | None]:
    """Return the hashes of cache keys, concatenated, and their groups; None if all are of group 0, which costs less."""
    if all(size % 8 == 0 for size in set(map(len, keys))):
        return b"".join(keys), None
    split = list(map(split_key, keys))
    return b"".join(block_hash for block_hash, _ in split), [group for _, group in split]


def prompt_hashes(
    tokens: Sequence[int], block_size: int, cache_salt: str = "", algorithm: str = "sha256"
) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, which a router looks up among the published ones."""
    chain = BlockHasher(algorithm, block_size).chain(cache_salt)
    chain.extend(b"".join(token.to_bytes(4, "little") for token in tokens))
    return chain.hashes
