"""Frames of web sockets: whole messages for every split of the bytes, and each way to break the protocol."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_sockets import BINARY, CLOSE, PING, PONG, TEXT, client_frame

from quire.launch.http.web_socket.frames import (
    BYTES_PER_FRAME,
    FREE_FRAMES,
    Close,
    CloseCode,
    FrameReader,
    Opcode,
    Ping,
    Received,
    SocketClosed,
    Text,
    accept_key,
    close_frame,
    frame,
)

LONG = 2**16 + 5


def read(data: bytes, max_bytes: int = 10**6) -> list[Received]:
    return FrameReader(max_bytes).feed(data)


def broken(data: bytes, max_bytes: int = 10**6) -> int:
    with pytest.raises(SocketClosed) as closed:
        read(data, max_bytes)
    return closed.value.code


def test_accept_key_of_the_specification() -> None:
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@given(st.lists(st.tuples(st.text(), st.integers(1, 4)), max_size=5), st.integers(), st.booleans())
def test_messages_do_not_depend_on_the_split(texts: list[tuple[str, int]], seed: int, pings: bool) -> None:
    rng = random.Random(seed)
    data, expected = b"", list[Received]()
    for text, num_fragments in texts:
        whole = text.encode()
        cuts = [0, *sorted(rng.randint(0, len(whole)) for _ in range(num_fragments - 1)), len(whole)]
        for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
            if pings:
                data += client_frame(PING, b"%d" % i) + client_frame(PONG, b"ignored")
                expected.append(Ping(b"%d" % i))
            data += client_frame(TEXT if i == 0 else 0, whole[begin:end], final=i == num_fragments - 1)
        expected.append(Text(whole))
    reader, found = FrameReader(10**6), list[Received]()
    at = 0
    while at < len(data):
        size = rng.randint(1, 20)
        found += reader.feed(data[at : at + size])
        at += size
    assert found == expected == read(data)
    assert reader.num_bytes == 0


@pytest.mark.parametrize("size", [0, 1, 125, 126, 1024, 1025, 2**16 - 1, 2**16, LONG])
def test_sizes(size: int) -> None:
    data = b"x" * size
    assert read(client_frame(TEXT, data)) == [Text(data)]
    written = frame(Opcode.TEXT, data)
    assert written.endswith(data)
    assert len(written) - size == (2 if size < 126 else 4 if size < 2**16 else 10)


def test_nothing_is_read_after_a_close() -> None:
    after = client_frame(TEXT, b"late")
    assert read(client_frame(CLOSE, (1000).to_bytes(2) + b"bye") + after) == [Close(1000)]
    assert read(client_frame(CLOSE, b"") + after) == [Close(None)]


def test_close_frame_has_at_most_125_bytes() -> None:
    code, text = close_frame(CloseCode.POLICY, "ü" * 100)[2:4], close_frame(CloseCode.POLICY, "ü" * 100)[4:]
    assert (int.from_bytes(code), text.decode()) == (1008, "ü" * 61)


BROKEN = {
    "not masked": (b"\x81\x01x", CloseCode.PROTOCOL_ERROR),
    "reserved bit": (b"\xc1\x80" + bytes(4), CloseCode.PROTOCOL_ERROR),
    "unknown opcode": (client_frame(3, b""), CloseCode.PROTOCOL_ERROR),
    "unknown control": (client_frame(11, b""), CloseCode.PROTOCOL_ERROR),
    "binary": (client_frame(BINARY, b"x"), CloseCode.UNSUPPORTED),
    "continuation of nothing": (client_frame(0, b"x"), CloseCode.PROTOCOL_ERROR),
    "message inside another": (client_frame(TEXT, b"x", final=False) + client_frame(TEXT, b"y"), 1002),
    "long control": (client_frame(PING, b"x" * 126), CloseCode.PROTOCOL_ERROR),
    "control in fragments": (client_frame(PING, b"", final=False), CloseCode.PROTOCOL_ERROR),
    "length not in short form": (b"\x81\xfe\x00\x05" + bytes(9), CloseCode.PROTOCOL_ERROR),
    "huge length": (b"\x81\xff" + b"\xff" * 8 + bytes(4), CloseCode.TOO_BIG),
    "invalid text": (client_frame(TEXT, b"\xff"), CloseCode.INVALID_TEXT),
    "text cut inside a character": (client_frame(TEXT, "ü".encode()[:1]), CloseCode.INVALID_TEXT),
    "close with one byte": (client_frame(CLOSE, b"\x03"), CloseCode.PROTOCOL_ERROR),
    "close with a reserved code": (client_frame(CLOSE, (1006).to_bytes(2)), CloseCode.PROTOCOL_ERROR),
    "close with an invalid reason": (client_frame(CLOSE, b"\x03\xe8\xff"), CloseCode.INVALID_TEXT),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_frames(case: str) -> None:
    data, code = BROKEN[case]
    assert broken(data) == code


def test_message_is_refused_before_its_data_come() -> None:
    head = client_frame(TEXT, b"x" * 101)[:6]
    assert broken(head, 100) == CloseCode.TOO_BIG
    first = client_frame(TEXT, b"x" * 60, final=False)
    assert broken(first + client_frame(0, b"x" * 41)[:6], 100) == CloseCode.TOO_BIG


def test_frames_that_bring_nothing_are_counted() -> None:
    assert broken(client_frame(PING, b"") * (FREE_FRAMES + 1)) == CloseCode.POLICY
    empty = client_frame(0, b"", final=False)
    assert broken(client_frame(TEXT, b"", final=False) + empty * FREE_FRAMES) == CloseCode.POLICY
    parts = client_frame(0, b"x" * BYTES_PER_FRAME, final=False) * (2 * FREE_FRAMES)
    whole = client_frame(TEXT, b"", final=False) + parts + client_frame(0, b"")
    assert len(read(whole, 10**7)) == 1
    assert len(read((client_frame(PING, b"") + client_frame(TEXT, b"x")) * (FREE_FRAMES + 1))) == 2 * (FREE_FRAMES + 1)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    reader = FrameReader(100)
    try:
        for byte in data:
            reader.feed(bytes((byte,)))
            assert reader.num_bytes <= 100 + 14
    except SocketClosed as closed:
        assert 1002 <= closed.code <= 1009
