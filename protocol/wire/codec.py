"""Encodes messages as frames and decodes them: typed, nothing executable, size limits checked before decoding.

Frame 0 is ``crc32`` (4 bytes, little-endian) followed by msgpack ``[epoch, seq, message]``. A small array is encoded in
it as ``[dtype, bytes]``; a large one as ``[dtype, length]``, with its data as a raw little-endian frame of its own. The
checksum covers everything after it, so it detects a flipped bit in the header as well as in an array.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_args
from zlib import crc32

import msgspec
import numpy as np

MAX_FRAMES = 17
MAX_FRAME_BYTES = 256 * 2**20
NARROW_FROM = 64
INLINE_BYTES = 1024
"""Maximum size of an array inside the header; below it, a separate frame costs more than the copy."""

_WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "<i4": np.dtype("<i4"),
    "<i8": np.dtype("<i8"),
    "<u2": np.dtype("<u2"),
    "|u1": np.dtype("|u1"),
    "<f4": np.dtype("<f4"),
}

M = TypeVar("M")


class ProtocolError(Exception):
    """A message that cannot be accepted; ``kind`` is crc, frames, decode, epoch or gap."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Envelope(NamedTuple):
    """One decoded message with its epoch and sequence number."""

    worker_epoch: int
    seq: int
    message: Any


class Codec(Generic[M]):
    """Encodes any message and decodes those of one closed union. Not thread-safe."""

    def __init__(self, union: Any) -> None:
        self._arrays: list[memoryview | bytes] = []
        self._next = 0
        self._kinds: dict[int, tuple[Any, np.dtype[Any]]] = {}
        """Dtypes by id of the annotation. The annotation is kept too, so that its id is not reused."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put_array)
        self._decoder = msgspec.msgpack.Decoder(tuple[int, int, union], dec_hook=self._take_array)

    def encode(self, worker_epoch: int, seq: int, message: Any) -> list[bytes | memoryview]:
        """Return the frames of ``message``, ready to send."""
        self._arrays = []
        body = self._encoder.encode((worker_epoch, seq, message))
        crc = crc32(body)
        for array in self._arrays:
            crc = crc32(array, crc)
        return [crc.to_bytes(4, "little") + body, *self._arrays]

    def decode(self, frames: Sequence[bytes | memoryview]) -> Envelope:
        """Return the message in ``frames``; its arrays are read-only views of them.

        Raises:
            ProtocolError: too many or too large frames, a wrong checksum, or anything but a known message.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise ProtocolError("frames", f"number of frames must be between 1 and {MAX_FRAMES} (got {len(frames)})")
        if any(len(f) > MAX_FRAME_BYTES for f in frames):
            size = max(map(len, frames))
            raise ProtocolError("frames", f"a frame must have at most {MAX_FRAME_BYTES} bytes (got {size})")
        if len(frames[0]) < 5:
            raise ProtocolError("frames", f"the first frame must have at least 5 bytes (got {len(frames[0])})")
        head = memoryview(frames[0])
        body = head[4:]
        crc = crc32(body)
        for frame in frames[1:]:
            crc = crc32(frame, crc)
        if crc != int.from_bytes(head[:4], "little"):
            sent = int.from_bytes(head[:4], "little")
            raise ProtocolError("crc", f"checksum does not match: the message has {sent:08x}, its data has {crc:08x}")
        # Only now, after the checksum: decoding takes frames in the order in which the header names arrays, so that a
        # damaged header could give one array the data of another.
        self._arrays, self._next = list(frames[1:]), 0
        try:
            worker_epoch, seq, message = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ProtocolError("decode", f"not a known message: {error}") from None
        except Exception as error:  # a struct's own check refused a value (InvalidRequest)
            raise ProtocolError("decode", f"value out of range: {error}") from None
        if self._next != len(self._arrays):
            sizes = f"{len(self._arrays)} array frames, but its header refers to {self._next}"
            raise ProtocolError("frames", f"the message has {sizes}")
        return Envelope(worker_epoch, seq, message)

    def _put_array(self, array: Any) -> tuple[str, int | bytes]:
        """Encode an array field for msgpack: its dtype, and its bytes or the length of a separate frame.

        An int32 array is sent as uint8 or uint16 if its values fit, which halves the size of ids for most vocabularies.
        """
        if not isinstance(array, np.ndarray) or array.ndim != 1:
            raise TypeError(f"cannot encode {type(array).__name__}")
        # A short array is not looked at: the look costs more than the bytes that it could save.
        if len(array) > NARROW_FROM and array.dtype == np.int32:
            highest = array.view(np.uint32).max()  # as unsigned, a negative value is the highest
            if highest < 65536:
                array = array.astype("|u1" if highest < 256 else "<u2")
        dtype = array.dtype.str
        if dtype not in _WIRE_DTYPES:
            raise TypeError(f"cannot encode an array of {array.dtype}")
        if array.nbytes <= INLINE_BYTES:
            return dtype, array.tobytes()
        self._arrays.append(np.ascontiguousarray(array).data.cast("B"))
        return dtype, len(array)

    def _take_array(self, kind: Any, spec: Any) -> Any:
        if not isinstance(spec, list) or len(spec) != 2:
            raise ValueError(f"expected an array as [dtype, data] (got {type(spec).__name__})")
        dtype = _WIRE_DTYPES.get(spec[0]) if isinstance(spec[0], str) else None
        data = spec[1] if isinstance(spec[1], bytes) else self._next_frame()
        if dtype is None:
            raise ValueError(f"array has dtype {str(spec[0])[:16]!r}, expected one of {', '.join(_WIRE_DTYPES)}")
        if len(data) % dtype.itemsize:
            raise ValueError(f"array of {dtype.str} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
        if not self._is_length(spec[1], len(data) // dtype.itemsize):
            length = f"{len(data) // dtype.itemsize} elements, but its header declares {str(spec[1])[:32]}"
            raise ValueError(f"array of {dtype.str} has {length}")
        wanted = self._wanted(kind)
        if (dtype.kind == "f") != (wanted.kind == "f") or dtype.itemsize > wanted.itemsize:
            raise ValueError(f"array has dtype {dtype}, but its field requires {wanted}")
        array = np.frombuffer(data, dtype=dtype)
        return array if dtype == wanted else array.astype(wanted)

    def _next_frame(self) -> memoryview | bytes:
        if self._next >= len(self._arrays):
            raise ValueError(f"array {self._next + 1} has no frame: the message has {len(self._arrays)} array frames")
        self._next += 1
        return self._arrays[self._next - 1]

    @staticmethod
    def _is_length(declared: Any, length: int) -> bool:
        return isinstance(declared, bytes) or (isinstance(declared, int) and declared == length)

    def _wanted(self, kind: Any) -> np.dtype[Any]:
        """Return the dtype of a field's annotation, cached because the look-up dominates decoding time."""
        known = self._kinds.get(id(kind))
        if known is None:
            known = self._kinds[id(kind)] = (kind, np.dtype(get_args(get_args(kind)[1])[0]))
        return known[1]
