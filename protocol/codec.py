"""Messages to frames and back: typed both ways, nothing executable, capped before it is decoded.

Frame 0 is ``crc32`` (4 bytes, little-endian) followed by msgpack ``[epoch, seq, message]``; the further frames are
raw little-endian arrays, which the message names by dtype and length. The checksum covers everything behind it, so
that a flipped bit in a header is seen as well as one in an array.
"""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_args
from zlib import crc32

import msgspec
import numpy as np

MAX_FRAMES = 17
MAX_FRAME_BYTES = 256 * 2**20
NARROW_FROM = 64

_WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "<i4": np.dtype("<i4"),
    "<u2": np.dtype("<u2"),
    "|u1": np.dtype("|u1"),
    "<f4": np.dtype("<f4"),
}

M = TypeVar("M")


class ProtocolError(Exception):
    """A message that cannot be taken as it is: ``kind`` is crc, frames, decode, epoch or gap."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Envelope(NamedTuple):
    """One decoded message and where it stands on its link."""

    epoch: int
    seq: int
    message: Any


class Codec(Generic[M]):
    """Encodes any message; decodes those of one closed union. Not for use by two threads at once."""

    def __init__(self, union: Any) -> None:
        self._arrays: list[memoryview | bytes] = []
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._put_array)
        self._decoder = msgspec.msgpack.Decoder(tuple[int, int, union], dec_hook=self._take_array)

    def encode(self, epoch: int, seq: int, message: Any) -> list[bytes | memoryview]:
        """The frames of ``message``, ready to send."""
        self._arrays = []
        body = self._encoder.encode((epoch, seq, message))
        crc = crc32(body)
        for array in self._arrays:
            crc = crc32(array, crc)
        return [crc.to_bytes(4, "little") + body, *self._arrays]

    def decode(self, frames: Sequence[bytes | memoryview]) -> Envelope:
        """The message in ``frames``; arrays in it are read-only views of them.

        Raises:
            ProtocolError: too many or too large frames, a wrong checksum, or anything but a known message.
        """
        if not 1 <= len(frames) <= MAX_FRAMES or any(len(f) > MAX_FRAME_BYTES for f in frames) or len(frames[0]) < 5:
            raise ProtocolError("frames", f"{len(frames)} frames, or one of a wrong size")
        head = memoryview(frames[0])
        body = head[4:]
        crc = crc32(body)
        for frame in frames[1:]:
            crc = crc32(frame, crc)
        if crc != int.from_bytes(head[:4], "little"):
            raise ProtocolError("crc", "checksum does not match")
        self._arrays, self._next = list(frames[1:]), 0
        try:
            epoch, seq, message = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ProtocolError("decode", f"not a known message: {error}") from None
        except Exception as error:  # a struct's own check refused a value (InvalidRequest)
            raise ProtocolError("decode", f"a value is out of range: {error}") from None
        if self._next != len(self._arrays):
            raise ProtocolError("frames", "more frames than the message names")
        return Envelope(epoch, seq, message)

    def _put_array(self, array: Any) -> tuple[str, int]:
        """Called by msgspec for each array field: append its bytes as a frame, leave dtype and length in its place.

        Ids travel in one or two bytes where all of them fit: half the size for most vocabularies.
        """
        if not isinstance(array, np.ndarray) or array.ndim != 1:
            raise TypeError(f"cannot encode {type(array).__name__}")
        if array.dtype == np.int32 and len(array) > NARROW_FROM and array.min() >= 0:
            highest = array.max()
            array = array.astype("|u1") if highest < 256 else array.astype("<u2") if highest < 65536 else array
        dtype = array.dtype.str
        if dtype not in _WIRE_DTYPES:
            raise TypeError(f"cannot encode an array of {array.dtype}")
        self._arrays.append(np.ascontiguousarray(array).data.cast("B") if len(array) else b"")
        return dtype, len(array)

    def _take_array(self, kind: Any, spec: Any) -> Any:
        if not isinstance(spec, list) or len(spec) != 2 or self._next >= len(self._arrays):
            raise ValueError("array without a frame")
        dtype = _WIRE_DTYPES.get(spec[0]) if isinstance(spec[0], str) else None
        frame = self._arrays[self._next]
        self._next += 1
        if dtype is None or not isinstance(spec[1], int) or len(frame) != spec[1] * dtype.itemsize:
            raise ValueError("array frame of a wrong dtype or length")
        wanted = np.dtype(get_args(get_args(kind)[1])[0])
        if (dtype.kind == "f" and wanted.kind != "f") or (dtype.kind != "f" and wanted.kind == "f"):
            raise ValueError("array of a wrong kind")
        array = np.frombuffer(frame, dtype=dtype)
        return array if dtype == wanted else array.astype(wanted)
