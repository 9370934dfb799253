"""Frames that no correct peer sends, most of them with a correct checksum, and random damage to real frames."""

import functools
import random
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs
from quire.protocol.wire.codec import MAX_FRAMES, Codec
from quire.protocol.wire.front_end_messages import (
    Abort,
    AddRequest,
    Control,
    Ended,
    EngineState,
    FrontEndToScheduler,
    Histogram,
    Introduced,
    Rejected,
    SchedulerToFrontEnd,
    Statistics,
    StepOutputs,
    Stop,
)
from quire.protocol.wire.link_messages import Heartbeat, Hello, Refused, Welcome
from quire.protocol.wire.side_rows import SideRows
from quire.protocol.wire.worker_messages import (
    Configure,
    Digest,
    Fault,
    MemoryPlan,
    ModelRunnerOutput,
    NewRequestData,
    Proposed,
    Ready,
    SampleInputs,
    SchedulerOutput,
    SchedulerToWorker,
    Shutdown,
    WorkerToScheduler,
)
from quire.scheduler_proc.requests.events import Consumed

Frames = list[bytes]
PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."
DEEP = 100_000


def seal(body: bytes, *arrays: bytes) -> Frames:
    """Return the frames with a correct checksum."""
    crc = crc32(body)
    for array in arrays:
        crc = crc32(array, crc)
    return [crc.to_bytes(4, "little") + body, *arrays]


def pack(worker_epoch: Any, seq: Any, message: Any) -> bytes:
    return msgspec.msgpack.encode([worker_epoch, seq, message])


def around(message: bytes, seq: int = 1) -> Frames:
    """Return an envelope around msgpack bytes."""
    return seal(b"\x93\x00" + msgspec.msgpack.encode(seq) + message)


def ints(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.int32)


def add_request(**fields: Any) -> AddRequest:
    told = {"request_id": "r1", "prompt_token_ids": ints(9), "sampling": SamplingParams(seed=5, stop=["."]), "seed": 7}
    return AddRequest(**told | fields)


def directions(config: Any) -> dict[str, tuple[Any, list[Any]]]:
    """Receivers by name: the union of messages, and real messages of every kind, with and without array frames."""
    new = NewRequestData(4, "r4", 5, 5, 0, [2], SamplingParams(top_k=3), 9)
    floats = np.array([-0.5, -1.5], np.float32)
    result = ModelRunnerOutput(
        3, ints(300), ints(300), side=[SideRows(1, [0], [0], [1], [2], [ints(2), ints(1)], [floats])],
        bad=[1], seconds=0.01, failed=[(2, "why")],
    )  # fmt: skip
    return {
        "front end to scheduler": (
            FrontEndToScheduler,
            [
                Hello(1, "frontend", 0, 9),
                add_request(),
                add_request(
                    prompt_token_ids=ints(2000) * 70,
                    output_token_ids=ints(3),
                    sampling=SamplingParams(
                        structured_outputs=StructuredOutputs(json={"a": [1, {"b": None}]}),
                        logit_bias={5: 1.5, 7: -2.0},
                        extra_args={"x": [1, "y"]},
                    ),
                ),
                Abort(["a", "b"]),
                Stop("a", 3),
                Control("statistics", 3),
                Heartbeat(1.5),
            ],
        ),
        "scheduler to front end": (
            SchedulerToFrontEnd,
            [
                Welcome(1, "digest"),
                Refused("why"),
                Rejected("r", "code", "param", "message"),
                StepOutputs([Introduced(1, "r", 0)], ints(400), ints(400), [Ended(1, 2, 3, None, "d")]),
                Statistics(1, waiting_by_reason={"x": 1}, kv_block_lifetime=Histogram([1.0], [1, 2], 3.0)),
                EngineState("ready"),
            ],
        ),
        "scheduler to worker": (
            SchedulerToWorker,
            [
                Configure(1, kv_layout(config.model, config.block_size, "float32"), config),
                SchedulerOutput(1, [3], [2], [new], ints(5), ints(2), [6], ints(2), ints(2), counts=[(4, 5)]),
                SchedulerOutput(2, token_ids=ints(5000) * 30),
                SampleInputs(2, [4], [1], ints(4)),
                Shutdown(),
            ],
        ),
        "worker to scheduler": (
            WorkerToScheduler,
            [
                Ready([33], MemoryPlan("cpu", 1, 2, 3, 4, 33, 16), {"load": 1.5}),
                Fault("error", "why"),
                result,
                Proposed(3, ints(2), ints(2), ints(3)),
                Digest(3, b"12345678"),
            ],
        ),
    }


@functools.cache
def hostile(known_tag: int) -> dict[str, Frames]:
    """Return frames with a correct checksum that cannot be decoded; ``known_tag``: the tag of a message of the
    receiver."""
    tag = msgspec.msgpack.encode(known_tag)
    array = {
        "another dtype": ["<i8", b"12345678"],
        "an object dtype": ["|O", b"12345678"],
        "a big-endian dtype": [">i4", b"12345678"],
        "a structured dtype": ["V8", b"12345678"],
        "a dtype with fields": ["i4,O", b"12345678"],
        "no dtype": [None, b"12345678"],
        "a dtype that is a number": [4, b"12345678"],
        "floats for ids": ["<f4", b"12345678"],
        "half an id": ["<i4", b"123"],
        "text for bytes": ["<i4", "12345678"],
        "an array that is one number": 8,
        "an array of numbers": [1, 2, 3, 4],
        "an array in a map": {"<i4": b"1234"},
        "an empty array": [],
        "a length without a frame": ["<i4", 2],
        "a negative length": ["<i4", -1],
        "a huge length": ["<i4", 2**63],
        "a length that is none": ["<i4", True],
        "a length in a float": ["<i4", 2.0],
    }
    bodies: dict[str, bytes] = {
        "nothing": b"\xc0",
        "a number": b"\x07",
        "a text": msgspec.msgpack.encode("hello"),
        "pickle": PICKLE,
        "pickle protocol 0": b"cposix\nsystem\n(S'id'\ntR.",
        "marshal": b"\xe3\x00\x00\x00\x00",
        "json": b'[0, 1, [11, ["a"]]]',
        "a map": b"\x80",
        "half a message": b"\x93\x00\x01\x92",
        "two numbers": b"\x92\x00\x01",
        "four of three": b"\x94\x00\x01\x91" + tag + b"\x00",
        "no tag": b"\x93\x00\x01\x90",
        "an unknown tag": b"\x93\x00\x01\x91\xcc\xfa",
        "a negative tag": b"\x93\x00\x01\x91\xff",
        "a tag in words": b"\x93\x00\x01\x91\xa210",
        "a tag in a float": b"\x93\x00\x01\x91\xcb" + b"\x40\x24" + bytes(6),
        "a tag alone": b"\x93\x00\x01" + tag,
        "a map for a message": b"\x93\x00\x01\x81\xa3tag" + tag,
        "an epoch in words": b"\x93\xa10\x01\x91" + tag,
        "an epoch in a float": b"\x93\xcb" + bytes(8) + b"\x01\x91" + tag,
        "no epoch": b"\x93\xc0\x01\x91" + tag,
        "an array that lies": b"\x93\x00\x01\xdd\xff\xff\xff\xff",
        "a short array that lies": b"\x93\x00\x01\xdc\xff\xff",
        "a map that lies": b"\x93\x00\x01\xdf\xff\xff\xff\xff",
        "bytes that lie": b"\x93\x00\x01\xc6\xff\xff\xff\xff",
        "a text that lies": b"\x93\x00\x01\xdb\xff\xff\xff\xff",
        "an ext that lies": b"\x93\x00\x01\xc9\xff\xff\xff\xff\x01",
        "an array that lies outside": b"\xdd\xff\xff\xff\xff",
        "nested arrays": b"\x91" * DEEP,
        "nested arrays inside": b"\x93\x00\x01" + b"\x91" * DEEP,
        "nested arrays in a field": b"\x93\x00\x01\x92" + tag + b"\x91" * DEEP,
        "nested maps": b"\x81\xa1x" * DEEP,
        "nested maps in a field": b"\x93\x00\x01\x92" + tag + b"\x81\xa1x" * DEEP,
        "megabytes of maps": b"\x80" * 10_000_000,
        "megabytes of maps in a field": b"\x93\x00\x01\x92" + tag + b"\xdd\x00\x98\x96\x80" + b"\x80" * 10_000_000,
        "megabytes of nothing": b"\x93\x00\x01\x92" + tag + b"\xdd\x00\x0f\x42\x40" + b"\xc0" * 1_000_000,
        "a reserved byte": b"\x93\x00\x01\xc1",
        **{
            f"ext {code}": b"\x93\x00\x01\x92" + tag + b"\xc7\x04" + code.to_bytes(1, "big", signed=True) + PICKLE[:4]
            for code in (-128, -1, 0, 1, 2, 127)
        },
        "an ext for a message": b"\x93\x00\x01\xd4\x01\x80",
        "an ext for an epoch": b"\x93\xd4\x02\x80\x01\x91" + tag,
    }
    found = {name: seal(body) for name, body in bodies.items()}
    for name, spec in array.items():
        body = pack(0, 1, [10, "r", spec, {}, 7])
        found[f"array: {name}"] = seal(body)
        found[f"result array: {name}"] = seal(pack(0, 1, [42, 1, spec]))
    return found


def miscut(frames: Frames) -> dict[str, Frames]:
    """Return the frames of a real message with frames added or missing."""
    head, *rest = frames
    return {
        "no frame": [],
        "an empty frame": [b""],
        "four bytes": [head[:4]],
        "half a head": [head[: len(head) // 2]],
        "a byte less": [head[:-1], *rest],
        "a byte more": [head + b"\x00", *rest],
        "sealed with a byte more": seal(head[4:] + b"\x00", *rest),
        "sealed with a message more": seal(head[4:] * 2, *rest),
        "an empty frame behind": [*frames, b""],
        "a sealed frame behind": seal(head[4:], *rest, b"1234"),
        "too many frames": [head, *rest, *[b""] * MAX_FRAMES],
        "sealed, too many frames": seal(head[4:], *[b"1234"] * (MAX_FRAMES + 1)),
        "thousands of frames": [head, *[b"x"] * 5000],
        "an empty frame in front": [b"", *frames],
        "frames without a head": rest or [b"1234"],
        "twice": frames * 2,
        "no checksum": [head[4:], *rest],
        "another checksum": [b"\x00\x00\x00\x00" + head[4:], *rest],
        "pickle for a checksum": [PICKLE, *frames],
    }


def damaged(frames: Frames, rng: random.Random, *, sealed: bool) -> Frames:
    """Change one or a few bytes of a real message; ``sealed``: with a correct checksum."""
    parts = [bytearray(frames[0][4:]), *(bytearray(f) for f in frames[1:])]
    for _ in range(rng.randint(1, 4)):
        part = parts[0 if rng.random() < 0.8 else rng.randrange(len(parts))]
        at = rng.randrange(len(part) + 1)
        match rng.randrange(6):
            case 0 if at < len(part):
                part[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(part):
                part[at] = rng.choice(
                    (0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xC9, 0xCB, 0xCF, 0xD9, 0xDD, 0xDF, 0xFF)
                )
            case 2:
                del part[at : at + rng.randint(1, 8)]
            case 3:
                part[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                part[at:at] = part[max(0, at - 12) : at]
            case _:
                del part[at:]
    if rng.random() < 0.05:
        rng.shuffle(parts)
    if rng.random() < 0.05:
        parts.append(bytearray(rng.randbytes(rng.choice((0, 4, 7)))))
    body, *rest = (bytes(part) for part in parts)
    return seal(body, *rest) if sealed else [frames[0][:4] + body, *rest]


VALUES: list[Any] = [
    -(2**63), -(2**31) - 1, -(2**31), -1, 0, 1, 2, 3, 5, 7, 64, 255, 1000, 2**31 - 1, 2**31, 2**63, 2**64 - 1,
    float("nan"), float("inf"), -0.0, 0.5, 1e308, True, False, None, "", "a", "r1", "x" * 300, "\ud7ff\n\x1b",
    b"", b"1234", [], {},
]  # fmt: skip


def altered(frames: Frames, rng: random.Random) -> Frames:
    """Replace, remove or repeat one or two values of a real message: most results can be decoded."""
    content = msgspec.msgpack.decode(frames[0][4:])
    for _ in range(rng.randint(1, 2)):
        _alter(content, rng)
    return seal(msgspec.msgpack.encode(content), *frames[1:])


def _alter(content: Any, rng: random.Random) -> None:
    """Return a random place within a list or a map."""
    keys = list(range(len(content))) if isinstance(content, list) else list(content)
    if not keys:
        return
    key = rng.choice(keys[2:] if len(keys) == 3 and isinstance(content[keys[2]], list) else keys)
    value = content[key]
    if isinstance(value, list | dict) and value and rng.random() < 0.85:
        _alter(value, rng)
    elif isinstance(value, bytes) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        content[key] = value[:place] + bytes([rng.randrange(256)]) + value[place + 1 :]
    elif isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
        content[key] = min(max(value + rng.choice((-1, 1)), -(2**63)), 2**64 - 1)
    elif isinstance(content, list) and rng.random() < 0.2:
        content[key : key + 1] = rng.choice(([], [value, value]))
    else:
        content[key] = rng.choice(VALUES)


def frames_of(message: Any, seq: int = 1, worker_epoch: int = 0) -> Frames:
    return [bytes(frame) for frame in Codec(Consumed).encode(worker_epoch, seq, message)]
