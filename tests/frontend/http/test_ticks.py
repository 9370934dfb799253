import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

import quire.frontend.http.__main__ as front_end


class Ended(Exception):
    pass


def test_a_front_end_without_descriptors_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of its memory is in a file, which it then cannot open."""
    sizes, ticks = iter([100]), iter(range(3))

    def resident_bytes() -> int:
        for size in sizes:
            return size
        raise OSError(errno.EMFILE, "Too many open files")

    def progress() -> None:
        if next(ticks) == 2:
            raise Ended

    monkeypatch.setattr(front_end, "resident_bytes", resident_bytes)
    monkeypatch.setattr(front_end, "TICK_S", 0)
    child = SimpleNamespace(watch_progress=lambda _: None, progress=progress)
    front: Any = SimpleNamespace(_child=child, _note_sessions=lambda: None)
    server: Any = SimpleNamespace(server_state=SimpleNamespace(tasks=()))
    with pytest.raises(Ended):
        asyncio.run(front_end.FrontEnd._tick(front, server))
