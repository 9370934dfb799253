"""Decodes the file of an image. Runs in helper processes only."""

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from quire.frontend.images.refused import Refused

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """Return an image upright and in RGB, as ``load_image`` of transformers does. Of an animation, the first frame.

    Raises:
        Refused: it is too large, damaged, or not of a known format.
        MemoryError: it needs more than the process may have.
    """
    Image.MAX_IMAGE_PIXELS = None  # checked here, with a limit of the server's own
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Refused(f"must be an image of at most {max_pixels} pixels (got {width} x {height})")
            return ImageOps.exif_transpose(image).convert("RGB")
    except (Refused, MemoryError):
        raise
    except UnidentifiedImageError:
        raise Refused(f"must be an image file: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Exception:  # Pillow's decoders raise SyntaxError, struct.error, OSError and others for hostile files
        raise Refused("must be a whole image file (got a damaged or truncated one)") from None
