"""Block hashes: equal exactly for equal prefixes with equal salts, and stable across machines and releases."""

from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from quire.protocol.block_hash import (
    CHUNK_BLOCKS,
    BlockHasher,
    HashMemo,
    InputFeature,
    group_key,
    hash_algorithm,
    prompt_hashes,
)
from quire.protocol.errors import ConfigError
from quire.scheduler_proc.requests.tokens import Tokens


def hashes(tokens: list[int], block_size: int = 4, salt: str = "", **more: Any) -> list[bytes]:
    chain = BlockHasher("sha256", block_size).chain(salt, **more)
    chain.extend(np.array(tokens, "<i4").tobytes())
    return chain.hashes


def test_golden_values() -> None:
    """Computed by hand from the specification: changing it would make old traces and other engines unreadable."""
    data = bytes([1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 0, 0, 2, 0, 0, 0])
    plain = [sha256(b"quire block chain 2\0" + data[:end]).digest() for end in (8, 16)]
    assert hashes([1, 256, 65535, 2, 9], block_size=2) == plain
    assert plain[1].hex() == "89e58dd9a976103881ada2cd51d08b209a14af58ea44f67408ab1e276d60754e"
    root = sha256(b"quire salted block chain 2\0" + bytes([1, 0, 0, 0]) + b"sa").digest()
    salted = [sha256(b"quire salted block chain 2\0" + root + data[:end]).digest() for end in (8, 16)]
    assert hashes([1, 256, 65535, 2], block_size=2, salt="s", adapter="a") == salted


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 1, 3, 4, 7, 8)] == [0, 0, 0, 1, 1, 2]


def test_a_hash_covers_all_tokens_before_it() -> None:
    base = hashes(list(range(12)))
    for changed in range(12):
        tokens = list(range(12))
        tokens[changed] = 99
        other = hashes(tokens)
        same = [a == b for a, b in zip(base, other, strict=True)]
        assert same == [block < changed // 4 for block in range(3)]


def test_salts_have_nothing_in_common() -> None:
    salts = ["", "a", "b", "a\0", "ab"]
    found = [h for salt in salts for h in hashes(list(range(8)), salt=salt)]
    assert len(set(found)) == len(found)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.integers(1, 7),
)
def test_appending_tokens_gives_the_hashes_of_the_whole_sequence(known: list[int], more: list[int], size: int) -> None:
    tokens = Tokens(np.array(known, np.int32), BlockHasher("sha256", size).chain("s"))
    for token in more:
        tokens.append(token)
    assert tokens.block_hashes == hashes(known + more, size, "s")
    assert tokens.array().tolist() == known + more and len(tokens) == len(known + more)


def test_tokens_copy_their_initial_array() -> None:
    known = np.arange(4, dtype=np.int32)
    tokens = Tokens(known, BlockHasher("sha256", 4).chain())
    known[0] = 77
    tokens.append(5)
    assert tokens.array().tolist() == [0, 1, 2, 3, 5]


def test_groups_have_different_keys() -> None:
    keys = {group_key(b"h" * 32, group) for group in range(300)}
    assert len(keys) == 300 and b"h" * 32 in keys


BLOCK, LONG = 2, 2 * CHUNK_BLOCKS * 2 + 7
"""Tokens per block, and of a prompt of more than two whole chunks."""


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_the_memo_does_not_change_hashes(algorithm: str) -> None:
    """A growing conversation, one that diverges in the middle, and one with another start."""
    first = list(range(LONG))
    longer, other, left = first + list(range(500)), [7, *first], [*first[:200], 1, *first[201:]]
    shared = BlockHasher(algorithm, BLOCK)
    for tokens in (first, longer, other, left, first, left):
        data = np.array(tokens, "<i4").tobytes()
        known, alone = shared.chain(), BlockHasher(algorithm, BLOCK, HashMemo(0)).chain()
        known.extend(data)
        for end in range(0, len(data) + 1, 4 * BLOCK):  # block by block, which bypasses the memo
            alone.extend(data[:end])
        assert known.hashes == alone.hashes and len(known.hashes) == len(tokens) // BLOCK


def test_a_long_prefix_is_hashed_once() -> None:
    hasher = BlockHasher("sha256", BLOCK)
    data = np.arange(LONG, dtype="<i4").tobytes()
    first, again = hasher.chain(), hasher.chain()
    first.extend(data)
    assert len(hasher.memo) == 2
    again.extend(data)
    chunk = CHUNK_BLOCKS * 2
    assert all(a is b for a, b in zip(first.hashes[:chunk], again.hashes[:chunk], strict=True)), (
        "hashes come from the memo"
    )
    assert first.hashes == again.hashes and len(hasher.memo) == 2


def test_the_memo_evicts_the_least_recently_used_chunk() -> None:
    memo = HashMemo(2)
    for name in (b"a", b"b"):
        memo.store([name])
    assert memo.find(b"a") == (b"a",)
    memo.store([b"c"])
    assert len(memo) == 2 and memo.find(b"b") is None and memo.find(b"a") and memo.find(b"c")


def test_adapters_share_no_hashes() -> None:
    names = [("", ""), ("", "x"), ("x", ""), ("x", "y"), ("xy", ""), ("", "xy")]
    found = [h for salt, adapter in names for h in hashes(list(range(8)), salt=salt, adapter=adapter)]
    assert len(set(found)) == len(found)


def test_block_hashes_cover_content_and_position_of_features() -> None:
    tokens = list(range(20))
    plain = hashes(tokens)

    def same_as_plain(*features: InputFeature) -> list[bool]:
        return [a == b for a, b in zip(hashes(tokens, features=features), plain, strict=True)]

    image = InputFeature(offset=6, length=3, content_hash=b"image")
    assert same_as_plain(image) == [True, False, False, False, False]
    assert same_as_plain(InputFeature(8, 1, b"image")) == [True, True, False, False, False]
    others = [InputFeature(6, 3, b"other"), InputFeature(7, 2, b"image"), image]
    seen = {tuple(hashes(tokens, features=[feature])) for feature in others}
    assert len(seen) == 3
    assert hashes(tokens, features=[image]) == hashes(tokens, features=[image])
    two = [InputFeature(0, 2, b"a"), InputFeature(2, 2, b"b")]
    assert hashes(tokens, features=two) == hashes(tokens, features=two[::-1])
    assert hashes(tokens, features=two) != hashes(tokens, features=[InputFeature(0, 2, b"b"), InputFeature(2, 2, b"a")])


@pytest.mark.parametrize("step", [4, 5, 37, 400])
def test_features_hash_the_same_however_a_prompt_grows(step: int) -> None:
    """Blocks behind the last feature are hashed as plain ones are, in chunks that the memo knows."""
    features = [InputFeature(2, 3, b"a"), InputFeature(5, 30, b"b"), InputFeature(41, 1, b"c")]
    data = np.arange(700, dtype="<i4").tobytes()
    hasher = BlockHasher("sha256", 4)
    whole, grown = (hasher.chain(features=features) for _ in range(2))
    whole.extend(data)
    for end in range(0, len(data) + 1, 4 * step):
        grown.extend(data[:end], data[max(end - 4 * step, 0) : end])
    count = len(grown.hashes)
    assert grown.hashes == whole.hashes[:count] and count > 70 and len(set(whole.hashes)) == 175
    assert grown.fork(data[:640]).hashes == whole.hashes[:40]
    assert len(hasher.memo) > 0


def test_prompt_hashes_equal_the_engines() -> None:
    assert prompt_hashes(list(range(11)), 4, "s") == hashes(list(range(11)), salt="s")
    assert prompt_hashes(list(range(11)), 4, algorithm="xxh3_128") != prompt_hashes(list(range(11)), 4)
    assert len(prompt_hashes([1, 2], 2, algorithm="xxh3_128")[0]) == 16


def test_unknown_hash_algorithms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be sha256 or xxh3_128 \(got 'md5'\)"):
        hash_algorithm("md5")
