"""A helper for images without a processor of transformers: ``python -m odd_image_helper``.

It decodes as the real one, in little memory, and misbehaves on request: a file ``!die`` and so on.
"""

import hashlib
import os
import signal
import time
import warnings
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from quire.frontend.images.decode import decode
from quire.frontend.images.image_helper import Hello, answer
from quire.frontend.images.source import StoredItem
from quire.protocol.process.helper import Answer, serve

EXTRA_BYTES = 256 * 2**20


class OddProcessor:
    def prepare(self, data: bytes, max_pixels: int, path: str) -> StoredItem:
        word, _, rest = data.partition(b" ")
        match word:
            case b"!die":
                os.kill(os.getpid(), int(rest))
            case b"!once":  # leaves a file, and dies if there was none
                if not (marker := Path(rest.decode())).exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGSEGV)
                data = (marker.parent / "image.png").read_bytes()
            case b"!spin":
                while True:
                    pass
            case b"!sleep":
                time.sleep(1000)
            case b"!take":
                bytearray(int(rest))
            case b"!full":
                raise OSError
        image = decode(data, max_pixels)
        content = save({"pixel_values": np.asarray(image)})
        Path(path).write_bytes(content)
        digest = hashlib.sha256(content).digest()
        texts = {"placeholder": "<image>", "expansion": "<image>" * 3}
        return StoredItem(digest=digest, path=path, num_rows=3, num_bytes=len(content), **texts)


def make(hello: bytes) -> tuple[bytes, Answer | None]:
    given = msgspec.msgpack.decode(hello, type=Hello)
    if given.folder == "none":
        return b"cannot be read: no processor", None
    return b"", lambda question: answer(OddProcessor(), question, given.max_pixels)  # type: ignore[arg-type]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(make, EXTRA_BYTES)
