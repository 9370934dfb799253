"""Files of images: what is read, what is refused, and that pixels are those of transformers."""

import io

import pytest
from image_files import FORMATS, bombs, image_file, not_images, whole_files
from PIL import Image, ImageOps

from quire.frontend.images.decode import decode
from quire.frontend.images.refused import Refused

MAX_PIXELS = 10**6


@pytest.mark.parametrize("name", whole_files())
def test_whole_files_are_decoded_as_transformers_does(name: str) -> None:
    data = whole_files()[name]
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")  # transformers' load_image
    image = decode(data, MAX_PIXELS)
    assert (image.mode, image.size, image.tobytes()) == ("RGB", expected.size, expected.tobytes())


def test_rotation_of_a_camera_is_applied() -> None:
    turned = decode(whole_files()["JPEG turned 6"], MAX_PIXELS)
    assert turned.size == (30, 40)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind: str) -> None:
    animated, still = (decode(data, MAX_PIXELS) for data in (whole_files()[f"{kind} animated"], image_file(kind)))
    assert max(abs(a - b) for a, b in zip(animated.tobytes(), still.tobytes(), strict=True)) < 10


@pytest.mark.parametrize("name", bombs())
def test_bombs(name: str) -> None:
    with pytest.raises(Refused, match=r"^must be (an image of at most 1000000 pixels|a whole image|an image file)"):
        decode(bombs()[name], MAX_PIXELS)


@pytest.mark.parametrize("name", not_images())
def test_other_files_and_parts(name: str) -> None:
    with pytest.raises(Refused, match=r"^must be (an image file: PNG, |a whole image file)"):
        decode(not_images()[name], MAX_PIXELS)


@pytest.mark.parametrize("kind", FORMATS)
def test_limit_of_pixels(kind: str) -> None:
    data = image_file(kind, (50, 20))
    assert decode(data, 1000).size == (50, 20)
    with pytest.raises(Refused, match=r"at most 999 pixels \(got 50 x 20\)"):
        decode(data, 999)
