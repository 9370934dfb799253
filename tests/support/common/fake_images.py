"""A reader of images without a model, and a chat template that writes images."""

import weakref
from collections.abc import Sequence

from tokenizers import Tokenizer

from quire.frontend.images.source import ImageSource, StoredItem
from quire.protocol.errors import InvalidRequest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICTURE = "data:image/png;base64,"


class FakeReader:
    """Takes 3 rows for the image ``...,a``, 2 for any other, around a token of text."""

    def __init__(self) -> None:
        self.stored: weakref.WeakSet[StoredItem] = weakref.WeakSet()
        self.places: list[str] = []

    async def read(self, sources: Sequence[ImageSource]) -> list[StoredItem]:
        return self.read_now(sources)

    def read_now(self, sources: Sequence[ImageSource]) -> list[StoredItem]:
        made = [self._stored(source) for source in sources]
        self.stored.update(made)
        return made

    def _stored(self, source: ImageSource) -> StoredItem:
        self.places.append(source.where)
        if source.url.startswith("http"):
            raise InvalidRequest(f"{source.where} must be a data URL", source.where)
        num_rows = 3 if source.url.endswith(",a") else 2
        expansion = "(<row>:" + "<row>" * (num_rows - 1) + ")"
        digest = source.url.removeprefix(PICTURE).encode().ljust(32)
        return StoredItem(
            digest=digest,
            path=source.url,
            placeholder="<image>",
            expansion=expansion,
            num_rows=num_rows,
            grid=(1, num_rows, 1),
            num_bytes=1000,
        )

    def close(self) -> None:
        pass


def with_image_tokens(tokenizer: Tokenizer) -> Tokenizer:
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_special_tokens(["<row>", "<image>"])
    return made
