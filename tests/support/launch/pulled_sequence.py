"""Base of made-up sequences that are written as a generator of updates."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from quire.frontend.engine.scheduler_link import Readers
from quire.frontend.engine.update import Update


class PulledSequence:
    """Implements ``take`` by the generator ``updates``, which advances only when its update was taken."""

    engines = ""

    def updates(self) -> AsyncIterator[Update]:
        raise NotImplementedError

    def start(self, readers: Readers, on_update: Callable[[], None]) -> None:
        self._found: Update | Exception | None = None
        self._taken = asyncio.Event()
        self._task = asyncio.create_task(self._run(partial(readers.call_later, on_update)))

    def take(self) -> Update | None:
        found, self._found = self._found, None
        self._taken.set()
        if isinstance(found, Exception):
            raise found
        return found

    async def _run(self, on_update: Callable[[], None]) -> None:
        try:
            async for update in self.updates():
                await self._offer(update, on_update)
        except Exception as error:
            await self._offer(error, on_update)

    async def _offer(self, found: Update | Exception, on_update: Callable[[], None]) -> None:
        self._found = found
        self._taken.clear()
        on_update()
        await self._taken.wait()
