"""Threads for what takes long: long texts, and conversations, whose template may. No event loop waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.launch.text.text_in import LONG_TEXT_CHARS, ChatOptions, TextIn

MAX_SHORT_BYTES = 8192
"""Far less than the template's helper takes for short, so that no request in that lane waits for a long one."""
NUM_LONG = 4
"""Only one of them is rendered at a time; the others may be tokenized."""

MAX_LONG_CHARS = 128 * 1024
"""As long as the context of a large model is; what is longer is seldom, and takes a thread for a tenth of a second."""
NUM_LONG_TEXTS = 4
NUM_HUGE_TEXTS = 2

T = TypeVar("T")


class TextLanes:
    """Short texts are worked on at once, long ones in some threads, and huge ones among themselves in fewer.

    So a client that sends many huge texts waits for those, and a long text of another client for long texts only.
    """

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(NUM_LONG_TEXTS, "long texts")
        self._huge = ThreadPoolExecutor(NUM_HUGE_TEXTS, "huge texts")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """``work()``, about so many characters, or what takes as long as they would."""
        if num_chars <= LONG_TEXT_CHARS:
            return work()
        lane = self._long if num_chars <= MAX_LONG_CHARS else self._huge
        return await asyncio.get_running_loop().run_in_executor(lane, work)


class ConversationLanes:
    """A thread for short conversations and some for the others: those wait for each other only."""

    def __init__(self, text_in: TextIn) -> None:
        """Has ``text_in`` prepare itself meanwhile."""
        self._short = ThreadPoolExecutor(1, "conversations")
        self._long = ThreadPoolExecutor(NUM_LONG, "long conversations")
        self._long.submit(text_in.prepare)

    async def run(self, num_bytes: int, options: ChatOptions, work: Callable[[], T]) -> T:
        """``work()``, about a conversation that came in a body of so many bytes."""
        is_short = num_bytes <= MAX_SHORT_BYTES and not options.variables
        return await asyncio.get_running_loop().run_in_executor(self._short if is_short else self._long, work)
