"""Makes what one front end needs to read items of prompts."""

from typing import NamedTuple

from quire.frontend.images.given_rows import RowsReader
from quire.frontend.images.options import ImageOptions
from quire.frontend.images.reader import HelperReader
from quire.frontend.images.store import ItemStore
from quire.protocol.config import EngineConfig


class ItemReaders(NamedTuple):
    """``images``, ``rows``: None if the model reads none. ``store``: of both."""

    images: HelperReader | None = None
    rows: RowsReader | None = None
    store: ItemStore | None = None

    def close(self) -> None:
        """Stop the helpers, and remove all files."""
        if self.images is not None:
            self.images.close()
        if self.store is not None:
            self.store.close()


def make_readers(config: EngineConfig, options: ImageOptions) -> ItemReaders:
    """Return the readers of a model. One without a vision tower and given embeddings has no store, either."""
    model = config.model
    if model.vision is None and not config.enable_prompt_embeds:
        return ItemReaders()
    store = ItemStore(options.memory_bytes)
    images = None
    if model.vision is not None:
        images = HelperReader(config.model_path, model.vision.token_id, options, store)
    rows = RowsReader(model.hidden_size, config.max_model_len, store) if config.enable_prompt_embeds else None
    return ItemReaders(images, rows, store)
