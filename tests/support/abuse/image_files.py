"""Files of images: whole ones of every kind that clients send, hostile ones, and mutations of them."""

import base64
import functools
import io
import random
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def image_file(kind: str = "PNG", size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: object) -> bytes:
    """Return a file with a gradient."""
    image = Image.linear_gradient("L").resize(size).convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@functools.cache
def whole_files() -> dict[str, bytes]:
    """Return files that must be read, by name."""
    found = {f"{kind} {mode}": image_file(kind, mode=mode) for kind in FORMATS for mode in ("RGB", "L")}
    for mode in ("RGBA", "LA", "P", "1", "I;16"):
        found[f"PNG {mode}"] = image_file("PNG", mode=mode)
    found["JPEG CMYK"] = image_file("JPEG", mode="CMYK")
    found["JPEG progressive"] = image_file("JPEG", progressive=True)
    found["WEBP RGBA"] = image_file("WEBP", mode="RGBA", lossless=True)
    found["BMP RGB"] = image_file("BMP")
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("blue", "red", "green")]
    for kind in ("GIF", "WEBP", "PNG"):
        found[f"{kind} animated"] = image_file(kind, save_all=True, append_images=frames)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        found[f"JPEG turned {orientation}"] = image_file("JPEG", exif=exif)
    found["PNG with a script"] = image_file() + b"<script>alert(1)</script>"
    return found


@functools.cache
def bombs() -> dict[str, bytes]:
    """Return small files that announce more than any limit allows, and must be refused."""
    rows = zlib.compress(bytes(2**24), 9)
    found = {f"PNG {side}": _png(side, side, rows) for side in (65_000, 2**31 - 1)}
    found["PNG of too few rows"] = _png(7_000, 7_000, zlib.compress(b"\0" * 100))
    gif = bytearray(image_file("GIF"))
    gif[6:10] = struct.pack("<HH", 65_000, 65_000)
    found["GIF 65000"] = bytes(gif)
    jpeg = bytearray(image_file("JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65_000, 65_000)
    found["JPEG 65000"] = bytes(jpeg)
    extended = b"VP8X" + struct.pack("<IB3x", 10, 2) + (16_000).to_bytes(3, "little") * 2
    frame = b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    found["WEBP 16001"] = b"RIFF" + struct.pack("<I", 4 + len(extended) + len(frame)) + b"WEBP" + extended + frame
    bmp = bytearray(image_file("BMP"))
    bmp[18:26] = struct.pack("<ii", 65_000, 65_000)
    found["BMP 65000"] = bytes(bmp)
    found["PNG text"] = _png(40, 30, rows, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27), 9)))
    return found


@functools.cache
def not_images() -> dict[str, bytes]:
    """Return files of other kinds, and parts of images."""
    whole = image_file("JPEG", (200, 200))
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    found = {"nothing": b"", "text": b"hello", "SVG": svg, "PDF": b"%PDF-1.7\n", "TIFF": image_file("TIFF")}
    found |= {"ICO": image_file("ICO", (32, 32)), "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"}
    found |= {f"{kind} cut": image_file(kind, (200, 200))[:-200] for kind in FORMATS}
    found["JPEG cut at its head"] = whole[:20]
    return found


def mutations(count: int, seed: int) -> Iterator[bytes]:
    """Yield ``count`` files that are mostly damaged: flipped, cut, repeated, joined, with other numbers."""
    chance = random.Random(seed)
    files = [*whole_files().values(), *bombs().values(), *not_images().values()]
    for _ in range(count):
        data = bytearray(chance.choice(files))
        for _ in range(chance.choice((1, 1, 2, 4, 32))):
            _mutate(data, chance, files)
        yield bytes(data[: 2**20])


def _mutate(data: bytearray, chance: random.Random, files: list[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    until = min(len(data), at + chance.choice((1, 2, 4, 16, 256)))
    match chance.randrange(7):
        case 0:
            data[at:until] = chance.randbytes(until - at)
        case 1:
            del data[at:until]
        case 2:
            del data[at:]
        case 3:
            data[at:at] = data[at:until] * chance.choice((1, 8, 64))
        case 4:
            data[at:until] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\xff\xd8", b"\1"))
        case 5:
            other = chance.choice(files)
            data[at:] = other[chance.randrange(len(other) + 1) :]
        case 6 if data:
            data[at % len(data)] ^= 1 << chance.randrange(8)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(width: int, height: int, rows: bytes, extra: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
