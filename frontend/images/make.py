"""Makes what one front end needs to read items of prompts."""

from collections.abc import Callable
from typing import NamedTuple

from quire.frontend.images.given_rows import RowsReader
from quire.frontend.images.options import ImageOptions
from quire.frontend.images.reader import ImageReader
from quire.frontend.images.store import ItemStore
from quire.protocol.config import EngineConfig


class ItemReaders(NamedTuple):
    """``images``, ``rows``: None if the model reads none. ``store``: of both."""

    images: ImageReader | None = None
    rows: RowsReader | None = None
    store: ItemStore | None = None

    def close(self) -> None:
        """Stop the helpers, and remove all files."""
        if self.images is not None:
            self.images.close()
        if self.store is not None:
            self.store.close()


def make_readers(config: EngineConfig, options: ImageOptions, expect_images: Callable[[int], None]) -> ItemReaders:
    """Return the readers of what the engine takes besides text; without any of it, there is no store, either.

    ``expect_images``: called with the token whose positions take rows, if the engine takes images.
    """
    model, kinds = config.model, config.item_kinds
    if not kinds:
        return ItemReaders()
    store = ItemStore(options.image_memory_bytes)
    images = None
    if model.vision is not None and "image" in kinds:
        expect_images(model.vision.token_id)
        images = ImageReader(config.model_path, model.vision.token_id, options, store)
    rows = RowsReader(model.hidden_size, config.max_model_len, store) if "rows" in kinds else None
    return ItemReaders(images, rows, store)
