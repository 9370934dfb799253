"""Embeddings that a client gives in place of tokens: from a field of JSON to a file in shared memory."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from quire.frontend.images.refused import Refused
from quire.frontend.images.source import StoredItem, check_base64, decode_base64
from quire.frontend.images.store import ItemStore
from quire.protocol.errors import printable

_DTYPES: dict[str, tuple[str, np.dtype[Any], int]] = {
    "float32": ("F32", np.dtype("<u4"), 0x7F800000),
    "bfloat16": ("BF16", np.dtype("<u2"), 0x7F80),
    "float16": ("F16", np.dtype("<u2"), 0x7C00),
}
"""Of each dtype: its name in safetensors files, an integer of its size, and its exponent's bits, which are all set in
infinities and NaN."""
MAX_HEADER_BYTES = 4096
"""Of a safetensors file, in addition to the largest tensor."""


class RowsReader:
    """Reads prompts given as embeddings. Thread-safe; blocks its caller for some milliseconds per megabyte."""

    def __init__(self, hidden_size: int, max_rows: int, store: ItemStore) -> None:
        """Args:
        hidden_size: width of the model's embeddings.
        max_rows: most rows, which is the longest context.
        """
        self._hidden_size = hidden_size
        self._max_rows = max_rows
        self._store = store

    def read(self, where: str, value: object) -> StoredItem:
        """Return the embeddings of the field ``where``.

        Args:
            value: base64 of a safetensors file with one tensor, or an object with dtype, shape and data (base64 of the
                little-endian elements); from a program, an array of float32 or float16. The shape is [rows, hidden
                size].

        Raises:
            InvalidRequest: anything else. Pickled tensors are refused, because to load them executes them.
        """
        most = self._max_rows * self._hidden_size * 4 + MAX_HEADER_BYTES
        try:
            match value:
                case np.ndarray():
                    data = value.astype(value.dtype.newbyteorder("<")).tobytes()
                    return self._store_rows(value.dtype.name, list(value.shape), data)
                case str():
                    return self._store_rows(*_of_file(_decoded(value, most)))
                case {"dtype": dtype, "shape": shape, "data": str(data), **others} if not others:
                    return self._store_rows(dtype, shape, _decoded(data, most))
            raise Refused("must be base64 of a safetensors file, or an object with dtype, shape and data in base64")
        except Refused as refused:
            raise refused.about(where) from None

    def _store_rows(self, dtype: Any, shape: Any, data: bytes) -> StoredItem:
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise Refused(f"must have the dtype {' or '.join(_DTYPES)} (got {printable(dtype)})")
        name, integer, exponent = _DTYPES[dtype]
        are_sizes = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int for size in shape)
        if not are_sizes or shape[1] != self._hidden_size or not 1 <= shape[0] <= self._max_rows:
            allowed = f"[n, {self._hidden_size}] with n from 1 to {self._max_rows}"
            raise Refused(f"must have the shape {allowed} (got {printable(shape)})")
        if len(data) != (size := shape[0] * shape[1] * integer.itemsize):
            raise Refused(f"must have {size} bytes of data for its shape (got {len(data)})")
        if ((np.frombuffer(data, integer) & exponent) == exponent).any():
            raise Refused("must have finite values (got an infinity or NaN)")
        header = json.dumps({"rows": {"dtype": name, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
        header += b" " * (-len(header) % 8)
        content = len(header).to_bytes(8, "little") + header + data
        digest = hashlib.sha256(f"rows {dtype} {shape}\0".encode() + data).digest()
        path = self._store.new_path()
        try:
            Path(path).write_bytes(content)
        except OSError:
            Path(path).unlink(missing_ok=True)
            raise Refused("cannot be read now, because the memory is full: retry later", is_busy=True) from None
        made = StoredItem(digest=digest, path=path, num_rows=shape[0], num_bytes=len(content), kind="rows")
        return self._store.add(made)


def _decoded(text: str, max_bytes: int) -> bytes:
    check_base64(len(text), max_bytes)
    return decode_base64(text)


def _of_file(data: bytes) -> tuple[str, list[int], bytes]:
    """Return dtype, shape and bytes of the only tensor in a safetensors file."""
    try:
        tensors: Any = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError):
        text = "must be a safetensors file, not a pickled one: safetensors.torch.save({'rows': tensor})"
        raise Refused(text) from None
    if len(tensors) != 1:
        raise Refused(f"must be a safetensors file with one tensor (got {len(tensors)})")
    tensor = tensors[0][1]
    dtype = next((dtype for dtype, (name, *_) in _DTYPES.items() if name == tensor["dtype"]), tensor["dtype"])
    return dtype, tensor["shape"], bytes(tensor["data"])
