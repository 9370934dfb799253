"""The checkpoint's processor: tensors and texts are those of transformers, and digests cover what they depend on."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import data_url, image_file, whole_files
from PIL import Image
from processor_families import FAMILIES, qwen
from safetensors.numpy import load_file

from quire.frontend.images.options import ImageOptions
from quire.frontend.images.reader import ImageReader
from quire.frontend.images.refused import Refused
from quire.frontend.images.source import ImageSource
from quire.frontend.images.store import ItemStore
from quire.protocol.errors import InvalidRequest

pytestmark = pytest.mark.full
FILES = (*whole_files().values(), image_file("JPEG", (300, 120)), image_file("PNG", (90, 200)))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_tensors_and_texts(family: Callable[[], tuple[Any, str, str]], tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    from quire.frontend.images.processing import Processor

    reference, _, row_token = family()
    reference.save_pretrained(tmp_path)
    token_id = reference.tokenizer.convert_tokens_to_ids(row_token)
    processor, other = (Processor(tmp_path, token_id) for _ in range(2))
    path = str(tmp_path / "image")
    first, second = (each.prepare(FILES[0], 10**6, path) for each in (processor, other))
    assert first.digest == second.digest and first.placeholder == reference.image_token
    for data in FILES:
        made = processor.prepare(data, 10**6, path)
        image = load_image(Image.open(io.BytesIO(data)))
        options = {"return_tensors": "np", "return_text_replacement_offsets": True}
        expected = reference(images=[image], text=[f"a {reference.image_token} b"], **options)
        assert made.expansion == expected["text_replacement_offsets"][0][0]["replacement"]
        assert made.num_rows == (np.asarray(expected["input_ids"]) == token_id).sum() > 0
        tensors = load_file(made.path)
        assert "pixel_values" in tensors and tensors.keys() <= expected.keys()
        for name, tensor in tensors.items():
            assert np.array_equal(tensor, expected[name]), name
        assert list(made.grid) == tensors.get("image_grid_thw", np.zeros((1, 0))).tolist()[0]


def test_digests(tmp_path: Path) -> None:
    """Equal for equal pixels, whatever the file; different for other pixels, another size and other settings."""
    from quire.frontend.images.processing import Processor

    reference, _, row_token = qwen()
    reference.save_pretrained(tmp_path)
    token_id = reference.tokenizer.convert_tokens_to_ids(row_token)
    processor = Processor(tmp_path, token_id)

    def digest_of(processor: Processor, data: bytes) -> bytes:
        return processor.prepare(data, 10**6, str(tmp_path / "image")).digest

    def digest(*args: Any, **options: Any) -> bytes:
        return digest_of(processor, image_file(*args, **options))

    first = digest("PNG")
    assert (
        first
        == digest("PNG", compress_level=0)
        == digest("BMP")
        == digest_of(Processor(tmp_path, token_id), image_file("WEBP", lossless=True))
    )
    assert len({first, digest("PNG", (30, 40)), digest("PNG", (41, 30)), digest("PNG", mode="1")}) == 4
    file = next(file for file in tmp_path.glob("*processor_config.json"))
    settings = json.loads(file.read_text())
    (settings.get("image_processor") or settings)["image_mean"] = [0.5, 0.5, 0.5]
    file.write_text(json.dumps(settings))
    assert digest_of(Processor(tmp_path, token_id), image_file("PNG")) != first


BAD_SETTINGS = (
    None,
    "[",
    "{}",
    '{"processor_class": "LlamaProcessor"}',
    '{"processor_class": "Qwen2_5_VLProcessor"}',
    '{"auto_map": {"AutoProcessor": "x.py--Y"}}',
)


@pytest.mark.parametrize("content", BAD_SETTINGS)
def test_processors_that_cannot_be_used(content: str | None, tmp_path: Path) -> None:
    """No code of a checkpoint is executed, and the reason is one line without a path."""
    from quire.frontend.images.processing import Processor

    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(Refused, match=r"^cannot be read: the checkpoint") as caught:
        Processor(tmp_path, 7)
    assert str(tmp_path) not in str(caught.value) and "\n" not in str(caught.value)


def test_a_processor_that_needs_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quire.frontend.images import processing

    def load(folder: Path) -> None:
        raise ImportError("\nX is required to run this. (/lib/x.py)\nInstall it")

    monkeypatch.setattr(processing, "_load", load)
    with pytest.raises(Refused, match=r"processor needs a package: X is .* this\.$"):
        processing.Processor(tmp_path, 7)


def test_helper_process(tmp_path: Path) -> None:
    reference, _, row_token = qwen()
    reference.save_pretrained(tmp_path / "model")
    (tmp_path / "items").mkdir()
    store = ItemStore(2**24, tmp_path / "items")
    token_id = reference.tokenizer.convert_tokens_to_ids(row_token)
    reader = ImageReader(str(tmp_path / "model"), token_id, ImageOptions(image_processes=1), store)
    [image] = reader.read_now([ImageSource("x", data_url(image_file("PNG", (100, 60))))])
    assert image.num_rows == image.grid[0] * image.grid[1] * image.grid[2] // 4 == image.expansion.count(row_token)
    assert load_file(image.path)["image_grid_thw"].tolist() == [list(image.grid)]
    with pytest.raises(
        InvalidRequest, match=r"^x must be an image that the model's processor takes \(got 1 x 500 pixels\)"
    ):
        reader.read_now([ImageSource("x", data_url(image_file("PNG", (1, 500))))])
    reader.close()
    store.close()
