"""Messages about items: rows of a prompt that come from an image or from the client, in place of tokens' embeddings.

An item is identified by the digest of its content, never by a name that a client gives.
"""

from collections.abc import Iterable

import msgspec

from quire.protocol.block_hash import InputFeature
from quire.protocol.wire.link_messages import Message

ITEM_DIGEST_BYTES = 32
"""Length of a digest: SHA-256."""
MAX_PATH = 4096
MAX_RANGES = 4096
"""Most ranges of an item: an image is at most some hundreds of tiles, between which a template has tokens."""


class InputItem(msgspec.Struct, array_like=True, frozen=True):
    """An item of a prompt.

    Attributes:
        digest: of an image: of its pixels, size, mode and the processor's settings; of given rows: of their bytes.
        ranges: (first position, number of positions) that take its rows, in the order of the rows, ascending. Tokens of
            the prompt may stand between two of them.
        path: safetensors file in shared memory with what every rank reads to encode it. It exists while a request
            with this path has not ended.
        kind: image, or rows (given by the client as they are).
        grid: patches of an image in time, height and width, from which some families compute positions; or empty.
    """

    digest: bytes
    ranges: list[tuple[int, int]]
    path: str
    kind: str = "image"
    grid: tuple[int, ...] = ()

    @property
    def begin(self) -> int:
        """Its first position."""
        return self.ranges[0][0]

    @property
    def end(self) -> int:
        """The position behind its last one."""
        return sum(self.ranges[-1])

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.ranges)

    @property
    def key(self) -> bytes:
        """Identity of its rows. It has their number, so that an item with the digest of another one cannot be given
        rows of another size."""
        return self.digest + self.num_rows.to_bytes(4, "little")

    def problem(self, begin: int, end: int) -> str:
        """Return what is wrong with it if its positions must be from ``begin`` up to ``end``, or an empty string."""
        if len(self.digest) != ITEM_DIGEST_BYTES:
            return f"the digest of an item must have {ITEM_DIGEST_BYTES} bytes (got {len(self.digest)})"
        if len(self.path) > MAX_PATH:
            return f"the path of an item must have at most {MAX_PATH} characters (got {len(self.path)})"
        if not 1 <= len(self.ranges) <= MAX_RANGES:
            return f"an item must have from 1 to {MAX_RANGES} ranges of positions (got {len(self.ranges)})"
        if self.grid and (len(self.grid) != 3 or min(self.grid) < 1):
            return f"the grid of an item must have 3 numbers of at least 1, or none (got {self.grid[:4]})"
        for first, count in self.ranges:
            if first < begin or count < 1 or first + count > end:
                places = f"from {begin} to {end - 1} (got {count} from {first} on)"
                return f"positions of items must be in ascending order, and of the prompt: {places}"
            begin = first + count
        return ""


def features_of(items: Iterable[InputItem]) -> list[InputFeature]:
    """Return what block hashes cover of items: for each range its digest, and the first of the rows there."""
    found: list[InputFeature] = []
    for item in items:
        row = 0
        for first, count in item.ranges:
            found.append(InputFeature(first, count, item.digest + row.to_bytes(4, "little")))
            row += count
    return found


class Encode(Message, frozen=True, tag=38):
    """Compute the rows of an item and keep them, beside the steps; every rank answers with Encoded.

    No step uses the rows before every rank has answered, and no step that is not answered uses those that are dropped.

    Attributes:
        dropped: keys of the items whose rows are freed first; a rank that could not encode one does not have it.
    """

    item: InputItem
    dropped: list[bytes] = []


class Encoded(Message, frozen=True, tag=54):
    """The end of an Encode on one rank.

    Attributes:
        problem: why it has no rows, in one line, or empty.
        seconds: duration, without the time in the worker's queue.
    """

    key: bytes
    problem: str = ""
    seconds: float = 0.0
