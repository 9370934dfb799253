"""Threads in which conversations become token ids: a template may take long, and no event loop waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.launch.text_in import ChatOptions, TextIn

MAX_SHORT_BYTES = 8192
"""Far less than the template's helper takes for short, so that nobody in that lane waits for a long one there."""
NUM_LONG = 4
"""Only one of them is rendered at a time; the others may be tokenized."""

T = TypeVar("T")


class ConversationLanes:
    """A thread for short conversations and some for the others: whoever sends those waits among their like."""

    def __init__(self, text_in: TextIn) -> None:
        """Has ``text_in`` prepare itself meanwhile."""
        self._short = ThreadPoolExecutor(1, "conversations")
        self._long = ThreadPoolExecutor(NUM_LONG, "long conversations")
        self._long.submit(text_in.prepare)

    async def run(self, num_bytes: int, options: ChatOptions, work: Callable[[], T]) -> T:
        """``work()``, about a conversation that came in a body of so many bytes."""
        is_short = num_bytes <= MAX_SHORT_BYTES and not options.variables
        return await asyncio.get_running_loop().run_in_executor(self._short if is_short else self._long, work)
