"""Prompts given as embeddings: forms that are read, and what is refused by the field's name."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors

from quire.frontend.images.given_rows import RowsReader
from quire.frontend.images.store import ItemStore
from quire.protocol.errors import InvalidRequest

ROWS = torch.arange(24, dtype=torch.float32).reshape(3, 8) / 7
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[RowsReader]:
    store = ItemStore(2**20, tmp_path)
    yield RowsReader(8, 10, store)
    store.close()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(**tensors: torch.Tensor) -> str:
    return text(safetensors.save(tensors))


def object_of(rows: torch.Tensor, **changes: object) -> dict[str, Any]:
    dtype = next(name for name, dtype in DTYPES.items() if dtype is rows.dtype)
    raw = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": dtype, "shape": list(rows.shape), "data": text(raw)} | changes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [lambda rows: file_of(anything=rows), object_of])
def test_forms(form: Any, dtype: str, reader: RowsReader) -> None:
    rows = ROWS.to(DTYPES[dtype])
    stored = reader.read("prompt_embeds", form(rows))
    assert stored.num_rows == 3 and stored.num_bytes == Path(stored.path).stat().st_size
    assert torch.equal(safetensors.load_file(stored.path)["rows"], rows)
    assert reader.read("prompt_embeds", object_of(rows)) is stored  # one file for equal content
    assert reader.read("prompt_embeds", object_of(rows[:2])).digest != stored.digest


def test_arrays_of_a_program(reader: RowsReader) -> None:
    stored = reader.read("prompt_embeds", ROWS.numpy().astype(">f4").T.copy().T)
    assert torch.equal(safetensors.load_file(stored.path)["rows"], ROWS)
    with pytest.raises(InvalidRequest, match=r"prompt_embeds must have the dtype .* \(got 'float64'\)"):
        reader.read("prompt_embeds", ROWS.numpy().astype(np.float64))


def test_file_lives_as_long_as_its_object(reader: RowsReader) -> None:
    stored = reader.read("prompt_embeds", object_of(ROWS))
    path = Path(stored.path)
    assert path.exists()
    del stored
    assert not path.exists()


def pickled() -> str:
    file = io.BytesIO()
    torch.save(ROWS, file)
    return text(file.getvalue())


def with_value(value: float, dtype: torch.dtype) -> torch.Tensor:
    rows = ROWS.to(dtype).clone()
    rows[2, 7] = value
    return rows


BAD: dict[str, tuple[object, str]] = {
    "number": (7, "must be base64 of a safetensors file, or an object with dtype, shape and data"),
    "list": ([[1.0] * 8], "must be base64 of a safetensors file"),
    "other keys": (object_of(ROWS) | {"x": 1}, "must be base64 of a safetensors file, or an object"),
    "no base64": ("%%%", "must have standard base64 with padding"),
    "no padding": ("AAA", "must have standard base64 with padding"),
    "not ASCII": ("ÄÄÄÄ", "must have standard base64 with padding"),
    "too long": ("A" * 8192, r"must have at most 4416 bytes \(got about 6144\)"),
    "nothing": ("", "must be a safetensors file"),
    "other file": (text(b"GIF89a" * 9), "must be a safetensors file"),
    "huge header": (text(b"\xff" * 64), "must be a safetensors file"),
    "pickled": (pickled(), "must be a safetensors file, not a pickled one"),
    "two tensors": (file_of(a=ROWS, b=ROWS + 1), r"with one tensor \(got 2\)"),
    "integers": (file_of(rows=ROWS.to(torch.int32)), r"must have the dtype .* \(got 'I32'\)"),
    "one dimension": (file_of(rows=ROWS[0]), r"must have the shape \[n, 8\] with n from 1 to 10 \(got \[8\]\)"),
    "other width": (file_of(rows=ROWS[:, :7].clone()), r"must have the shape \[n, 8\] .* \(got \[3, 7\]\)"),
    "too many rows": (file_of(rows=ROWS.repeat(4, 1)), r"\(got \[12, 8\]\)"),
    "no rows": (object_of(ROWS[:0]), r"\(got \[0, 8\]\)"),
    "no sizes": (object_of(ROWS, shape=[True, 8]), "must have the shape"),
    "huge sizes": (object_of(ROWS, shape=[2**70, 8]), "must have the shape"),
    "negative sizes": (object_of(ROWS, shape=[-3, -8]), "must have the shape"),
    "no shape": (object_of(ROWS, shape="3x8"), r"must have the shape .* \(got '3x8'\)"),
    "bytes missing": (object_of(ROWS, shape=[4, 8]), r"must have 128 bytes of data for its shape \(got 96\)"),
    "dtype": (object_of(ROWS, dtype=["float32"]), "must have the dtype"),
    "data": (object_of(ROWS, data=None), "must be base64 of a safetensors file, or an object"),
    **{
        f"{value} in {dtype}": (object_of(with_value(value, each)), "must have finite values")
        for dtype, each in DTYPES.items()
        for value in (float("nan"), float("inf"), float("-inf"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str, reader: RowsReader) -> None:
    value, reason = BAD[name]
    with pytest.raises(InvalidRequest, match=f"^prompt_embeds {reason}|^prompt_embeds must .*{reason}") as caught:
        reader.read("prompt_embeds", value)
    assert caught.value.param == "prompt_embeds" and caught.value.code == "invalid_value"
