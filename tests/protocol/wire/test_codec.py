"""The codec: every message survives the round trip; damaged, oversized and unknown ones are refused."""

import random
import types
import typing
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import make_config
from tiers import examples

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.request.pooling_params import POOLING_TASKS, PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.arrays import Float32, Int32, Int64
from quire.protocol.wire.codec import INLINE_BYTES, MAX_FRAMES, Codec, ProtocolError
from quire.protocol.wire.front_end_messages import AddRequest, FrontEndToScheduler, SchedulerToFrontEnd
from quire.protocol.wire.transfer_messages import MoveKind
from quire.protocol.wire.worker_messages import (
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerToWorker,
    Shutdown,
    WorkerToScheduler,
)
from quire.scheduler_proc.requests.events import Consumed

MODEL = make_config(vocab_size=9).model
CONFIG = EngineConfig(model=MODEL, model_path="/x", max_model_len=16)
UNIONS = (FrontEndToScheduler, SchedulerToFrontEnd, SchedulerToWorker, WorkerToScheduler, Consumed)
EVERY_MESSAGE = sorted({t for union in UNIONS for t in typing.get_args(union)}, key=lambda t: t.__name__)

# Arrays on both sides of the length from which ids below 65,536 are narrowed.
int32s = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70),
    st.lists(st.integers(0, 65535), min_size=60, max_size=90),
).map(lambda values: np.array(values, np.int32))
int64s = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=200).map(lambda values: np.array(values, np.int64))
float32s = st.lists(st.floats(width=32), max_size=5).map(lambda values: np.array(values, np.float32))
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    str: st.text(max_size=20),
    float: st.floats(),
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
    type(None): st.none(),
    Int32: int32s,
    Int64: int64s,
    Float32: float32s,
    MoveKind: st.sampled_from(MoveKind),
    SamplingParams: st.builds(SamplingParams, n=st.integers(1, 128), temperature=st.floats(0, 2), stop=st.just(["x"])),
    PoolingParams: st.builds(PoolingParams, task=st.sampled_from(POOLING_TASKS), dimensions=st.integers(0, 2**20)),
    EngineConfig: st.just(CONFIG),
    KVLayout: st.just(kv_layout(MODEL, 16, "float32")),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field's type, with integers that fit the wire."""
    if hint in LEAVES:
        return LEAVES[hint]
    inner = [values_of(part) for part in typing.get_args(hint) if part is not ...]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return st.one_of(inner)
    if typing.get_origin(hint) is list:
        return st.lists(*inner, max_size=3)
    if typing.get_origin(hint) is tuple:
        return st.lists(*inner, max_size=3).map(tuple) if ... in typing.get_args(hint) else st.tuples(*inner)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(*inner, max_size=3)
    return st.builds(hint, **{name: values_of(h) for name, h in typing.get_type_hints(hint).items()})


def same(a: Any, b: Any) -> bool:
    """Compare with arrays by dtype and bits, and NaN equal to NaN."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b) or (a != a and b != b)


def codec_for_all() -> Codec[Any]:
    return Codec(typing.Union[tuple(EVERY_MESSAGE)])  # noqa: UP007


def frames_of(message: Any) -> list[bytes]:
    return [bytes(f) for f in codec_for_all().encode(3, 5, message)]


def signed(body: bytes, *arrays: bytes) -> list[bytes]:
    """Return frames with a right checksum around any content."""
    crc = crc32(body)
    for array in arrays:
        crc = crc32(array, crc)
    return [crc.to_bytes(4, "little") + body, *arrays]


def refused(frames: list[bytes], union: Any = FrontEndToScheduler) -> str:
    with pytest.raises(ProtocolError) as caught:
        Codec(union).decode(frames)
    return caught.value.kind


BIG = AddRequest("r", np.arange(2000, dtype=np.int32), SamplingParams(), 7, np.arange(1500, dtype=np.int32))
"""A request with arrays in separate frames."""

REQUEST = AddRequest("r", np.arange(5, dtype=np.int32), SamplingParams(), 7, np.arange(2, dtype=np.int32))


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(EVERY_MESSAGE).flatmap(values_of))
def test_every_message_survives_a_round_trip(message: Any) -> None:
    envelope = codec_for_all().decode(frames_of(message))
    assert (envelope.worker_epoch, envelope.seq) == (3, 5)
    assert same(envelope.message, message)


def test_every_message_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in EVERY_MESSAGE]
    assert len(set(tags)) == len(tags) and all(isinstance(tag, int) for tag in tags)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 70000) | st.integers(0, 99), min_size=60, max_size=70))
def test_narrowed_ids_are_decoded_as_int32(values: list[int]) -> None:
    array = np.array(values, np.int32)
    frames = frames_of(ModelRunnerOutput(1, array))
    got = codec_for_all().decode(frames).message.tokens
    assert got.dtype == np.int32 and got.tolist() == values
    narrow = len(values) > 64 and max(values) < 65536
    size = sum(len(frame) for frame in frames) - len(values) * (2 if narrow else 4)
    assert 0 < size < 48


@pytest.mark.parametrize("length", [0, 1, 64, 65, 256, 257, 512, 513, 5000])
def test_small_arrays_are_encoded_in_the_header(length: int) -> None:
    array = np.arange(length, dtype=np.int32) + 70_000
    frames = frames_of(ModelRunnerOutput(1, array))
    assert len(frames) == (1 if array.nbytes <= INLINE_BYTES else 2)
    assert codec_for_all().decode(frames).message.tokens.tolist() == array.tolist()


@pytest.mark.parametrize(
    "spec", [["<i4", b"123"], ["<i4", -1], ["<i4", None], ["<i2", b""], ["<i8", bytes(8)], ["<f4", b"1234"], [b"", 0]]
)
def test_invalid_inline_array_is_refused(spec: Any) -> None:
    assert refused(signed(msgspec.msgpack.encode([1, 2, [42, 1, spec]]))) == "decode"


def test_negative_ids_are_never_narrowed() -> None:
    array = np.full(100, -1, np.int32)
    assert codec_for_all().decode(frames_of(ModelRunnerOutput(1, array))).message.tokens.tolist() == [-1] * 100


def test_decoded_arrays_cannot_be_written_to() -> None:
    """They are views of the frames that the event log stores."""
    array = codec_for_all().decode(frames_of(REQUEST)).message.prompt_token_ids
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("array", [np.zeros(3, np.uint64), np.zeros(3, np.float64), np.zeros((2, 2), np.int32)])
def test_array_of_an_unsupported_type_is_not_encoded(array: Any) -> None:
    with pytest.raises((TypeError, msgspec.MsgspecError)):
        frames_of(ModelRunnerOutput(1, array))


def test_any_flipped_bit_is_detected() -> None:
    frames = frames_of(REQUEST)
    for index, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            damaged = bytearray(frame)
            damaged[bit // 8] ^= 1 << bit % 8
            assert refused([*frames[:index], bytes(damaged), *frames[index + 1 :]]) == "crc"


def test_lost_added_swapped_and_truncated_frames_are_detected() -> None:
    head, prompt, output = frames_of(BIG)
    assert refused([head, prompt]) == "crc"
    assert refused([head, output, prompt]) == "crc"
    assert refused([head, prompt, output, b"more"]) == "crc"
    assert refused([head, prompt[:-4], output]) == "crc"
    assert refused([head[:-1], prompt, output]) == "crc"
    assert refused([head, prompt, output, b""]) == "frames"  # an empty frame changes no checksum
    for frames in ([], [b""], [b"\0\0\0\0"]):
        assert refused(frames) == "frames"


def test_frames_that_do_not_match_the_header_are_refused_despite_a_right_checksum() -> None:
    head, prompt, output = frames_of(BIG)
    assert refused(signed(head[4:], prompt)) == "decode"
    assert refused(signed(head[4:], prompt[:-4], output)) == "decode"
    assert refused(signed(head[4:], prompt, output, b"more")) == "frames"
    assert refused(signed(head[4:] + b"\0", prompt, output)) == "decode"  # trailing bytes


def test_too_many_frames_are_refused_before_decoding() -> None:
    assert refused(signed(b"x", *[b""] * MAX_FRAMES)) == "frames"


class Huge(bytes):
    """Claims to exceed the size limit of a frame."""

    def __len__(self) -> int:
        return 256 * 2**20 + 1


def test_oversized_frame_is_refused_before_decoding() -> None:
    assert refused([b"12345", Huge()]) == "frames"


def test_messages_of_another_link_and_unknown_tags_are_refused() -> None:
    assert refused(frames_of(Shutdown())) == "decode"
    assert refused(frames_of(SchedulerOutput(1)), WorkerToScheduler) == "decode"
    assert refused(signed(msgspec.msgpack.encode([0, 1, [250, 1]]))) == "decode"
    assert refused(signed(msgspec.msgpack.encode([0, 1, ["10", 1]]))) == "decode"
    assert refused(signed(msgspec.msgpack.encode({"tag": 11}))) == "decode"


@pytest.mark.parametrize(
    "spec",
    [["<i8", 4], ["<f4", 8], ["|O", 4], ["<i4", 7], ["<i4", -8], ["<i4"], ["<i4", 8, 1], "<i4", None, [1, 8], 5],
)
def test_array_of_a_wrong_dtype_or_length_is_refused(spec: Any) -> None:
    body = msgspec.msgpack.encode([0, 1, [10, "r", spec, {}, 7]])
    assert refused(signed(body, bytes(32))) == "decode"


def test_bytes_in_place_of_a_float_are_refused() -> None:
    body = msgspec.msgpack.encode([0, 1, [42, 1, None, None, None, None, None, ["<i4", 1]]])
    assert refused(signed(body, bytes(4)), WorkerToScheduler) == "decode"


def test_values_out_of_range_fail_decoding() -> None:
    for sampling in ({"temperature": 9.0}, {"temperature": float("nan")}, {"n": 0}, {"surprise": 1}, {"top_k": "5"}):
        body = msgspec.msgpack.encode([0, 1, [10, "r", ["<i4", 1], sampling, 7]])
        assert refused(signed(body, bytes(4))) == "decode"


def test_random_bytes_raise_only_protocol_errors() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        frames = signed(rng.randbytes(rng.randrange(1, 40)), *[rng.randbytes(8)] * rng.randrange(2))
        assert refused(frames) in ("decode", "frames")


def test_codec_works_after_an_error() -> None:
    codec: Codec[Any] = Codec(FrontEndToScheduler)
    head, prompt, output = frames_of(BIG)
    with pytest.raises(ProtocolError):
        codec.decode(signed(head[4:], prompt))
    assert same(codec.decode([head, prompt, output]).message, BIG)
