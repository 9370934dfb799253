"""Conversations with images get the tokens that transformers' processors give them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processor_families import FAMILIES

from quire.frontend.images.source import ImageSource, StoredItem
from quire.frontend.text.image_parts import MessageImages
from quire.frontend.text.message_checks import check_messages
from quire.frontend.text.prompts import encode_messages
from quire.frontend.text.text_in import ChatOptions, TextIn

pytestmark = pytest.mark.full


def conversations(user_text: str) -> list[list[dict[str, Any]]]:
    def image(width: int, height: int) -> dict[str, Any]:
        from PIL import Image

        pixels = np.arange(width * height * 3, dtype=np.uint32).reshape(height, width, 3) % 251
        return {"type": "image", "image": Image.fromarray(pixels.astype(np.uint8))}

    def text(value: str) -> dict[str, Any]:
        return {"type": "text", "text": value}

    one, other = image(48, 40), image(90, 30)
    answer = {"role": "assistant", "content": [text("a square")]}
    return [
        [{"role": "user", "content": [one, text("what is this?")]}],
        [{"role": "user", "content": [text("first "), one, other, text(" and"), one, text(user_text)]}],
        [{"role": "user", "content": [text("no picture")]}],
        [{"role": "user", "content": [other]}, answer, {"role": "user", "content": [text("and "), one]}],
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_token_ids(family: Callable[[], tuple[Any, str, str]], tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    processor, template, row_token = family()
    processor.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    text_in = TextIn.load(tmp_path)
    token_id = processor.tokenizer.convert_tokens_to_ids(row_token)
    text_in.read_images(token_id)

    def stored(image: Any, number: int) -> StoredItem:
        asked = processor(images=[[image]], text=[processor.image_token], return_text_replacement_offsets=True)
        expansion = asked["text_replacement_offsets"][0][0]["replacement"]
        return StoredItem(
            digest=bytes([number]) * 32,
            path=f"/{number}",
            placeholder=processor.image_token,
            expansion=expansion,
            num_rows=expansion.count(row_token),
            grid=(),
            num_bytes=0,
        )

    for messages in conversations("?"):
        given = [part["image"] for m in messages for part in m["content"] if part["type"] == "image"]
        found: list[ImageSource] = []
        checked = check_messages(messages, images=found)
        assert len(found) == len(given) and all(source.url for source in found)
        images = [stored(image, number) for number, image in enumerate(given)]
        options = ChatOptions(images=MessageImages(stored=images))
        prompt = encode_messages(checked, options, text_in, Limits)
        expected = processor.apply_chat_template(
            messages, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=True
        )
        assert prompt.token_ids.tolist() == list(expected["input_ids"][0])
        places = [place for each in prompt.items for begin, n in each.ranges for place in range(begin, begin + n)]
        assert places == np.flatnonzero(prompt.token_ids == token_id).tolist()
        assert [each.item.num_rows for each in prompt.items] == [each.num_rows for each in images]
    text_in.close()


class Limits:
    max_model_len, vocab_size = 4096, 400
