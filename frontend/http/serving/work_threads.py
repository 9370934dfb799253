"""Threads for slow work: tokenizing long texts, and rendering conversations. The event loop never waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.frontend.text.text_in import LONG_TEXT_CHARS, ChatOptions, TextIn

MAX_SHORT_BYTES = 8192
"""Far below the size up to which the template helper counts a conversation as short, so that these threads have no long
one."""
NUM_LONG = 4
"""Only one of them renders at a time; the others can tokenize."""

MAX_LONG_CHARS = 128 * 1024
"""The context of a large model. Longer texts are rare, and each occupies a thread for about 0.1 s."""
NUM_LONG_TEXTS = 4
NUM_HUGE_TEXTS = 2

T = TypeVar("T")


class TextThreads:
    """Processes short texts at once, long ones in one thread pool, and huge ones in a smaller pool of their own.

    If the tokenizer has been slow once, short texts are processed like long ones.

    A client that sends many huge texts therefore waits for its own; long texts of other clients wait only for long
    texts.
    """

    def __init__(self, text_in: TextIn) -> None:
        self._text_in = text_in
        self._long = ThreadPoolExecutor(NUM_LONG_TEXTS, "long texts")
        self._huge = ThreadPoolExecutor(NUM_HUGE_TEXTS, "huge texts")

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Return ``work()``. ``num_chars``: the length of its text, or of one that takes as long to tokenize."""
        if num_chars <= LONG_TEXT_CHARS and not self._text_in.is_slow:
            return work()
        threads = self._long if num_chars <= MAX_LONG_CHARS else self._huge
        return await asyncio.get_running_loop().run_in_executor(threads, work)


class ConversationThreads:
    """One thread for short conversations, one for those with template variables, and a pool for the others. Each waits
    only for those of its kind, as for the template's helpers."""

    def __init__(self, text_in: TextIn) -> None:
        """Start ``text_in.prepare`` in a thread."""
        self._short = ThreadPoolExecutor(1, "conversations")
        self._varied = ThreadPoolExecutor(1, "conversations with variables")
        self._long = ThreadPoolExecutor(NUM_LONG, "long conversations")
        self._long.submit(text_in.prepare)

    async def run(self, num_bytes: int, options: ChatOptions, work: Callable[[], T]) -> T:
        """Return ``work()``. ``num_bytes``: size of the request body that holds the conversation."""
        short = self._varied if options.variables else self._short
        threads = short if num_bytes <= MAX_SHORT_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)
