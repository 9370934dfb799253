"""Items: computes the rows of requests' images, and schedules no position before its rows are there."""

from typing import Any

from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.features.items.arriving_items import check_items


class Items(Feature):
    """Images and given embeddings of prompts."""

    name = "items"

    def __init__(self, core: Core) -> None:
        self._core = core
        self.is_enabled = bool(core.config.item_kinds)

    def validate(self, event: Any, num_prompt_tokens: int) -> None:
        if event.items:
            check_items(event.items, num_prompt_tokens, self._core.config)
