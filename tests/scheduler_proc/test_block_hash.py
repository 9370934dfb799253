"""Block hashes: equal exactly for equal prefixes under equal salts, and the same on every machine for ever."""

from hashlib import sha256
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scheduler_proc.kv.block_hash import BlockHasher, group_key
from quire.scheduler_proc.request import OpaqueTokens, Tokens


def hashes(tokens: list[int], block_size: int = 4, salt: str = "", **more: Any) -> list[bytes]:
    chain = BlockHasher("sha256", block_size).chain(salt, **more)
    chain.extend(np.array(tokens, "<i4").tobytes())
    return chain.hashes


def test_golden_values() -> None:
    """Built by hand from the description: a change of it would make old traces and other engines unreadable."""
    data = bytes([1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 0, 0, 2, 0, 0, 0])
    plain = [sha256(b"quire block chain 2\0" + data[:end]).digest() for end in (8, 16)]
    assert hashes([1, 256, 65535, 2, 9], block_size=2) == plain
    assert plain[1].hex() == "89e58dd9a976103881ada2cd51d08b209a14af58ea44f67408ab1e276d60754e"
    root = sha256(b"quire salted block chain 2\0" + bytes([1, 0, 0, 0]) + b"sa").digest()
    salted = [sha256(b"quire salted block chain 2\0" + root + data[:end]).digest() for end in (8, 16)]
    assert hashes([1, 256, 65535, 2], block_size=2, salt="s", adapter="a") == salted


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(list(range(n)))) for n in (0, 1, 3, 4, 7, 8)] == [0, 0, 0, 1, 1, 2]


def test_a_hash_covers_all_that_came_before() -> None:
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.integers(1, 7),
)
def test_growing_token_by_token_gives_the_hashes_of_the_whole(known: list[int], more: list[int], size: int) -> None:
    tokens = Tokens(np.array(known, np.int32), BlockHasher("sha256", size).chain("s"))
    for token in more:
        tokens.append(token)
    assert tokens.block_hashes == hashes(known + more, size, "s")
    assert tokens.array().tolist() == known + more and len(tokens) == len(known + more)


def test_tokens_do_not_change_the_array_that_they_were_made_from() -> None:
    known = np.arange(4, dtype=np.int32)
    tokens = Tokens(known, BlockHasher("sha256", 4).chain())
    known[0] = 77
    tokens.append(5)
    assert tokens.array().tolist() == [0, 1, 2, 3, 5]


def test_groups_have_keys_of_their_own() -> None:
    keys = {group_key(b"h" * 32, group) for group in range(300)}
    assert len(keys) == 300 and b"h" * 32 in keys


def test_opaque_tokens_know_only_length_and_given_hashes() -> None:
    tokens = OpaqueTokens(5, [b"x"])
    tokens.append(7)
    assert len(tokens) == 6 and tokens.block_hashes == [b"x"]
    assert tokens.array().tolist() == [0] * 6
