"""Waits of tests: for a condition, and those of a tree of processes for the machine's processors."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType


def wait_for(condition: Callable[[], object], seconds: float = 60.0, pause: float = 0.002) -> None:
    """Wait until ``condition`` holds, and fail after ``seconds``: a wait without an end hangs the whole suite."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition is not true after {seconds:g} s"
        time.sleep(pause)


class Watch:
    """Context manager that measures a block.

    Sleeping, waiting for events and computing count as the processes' own time. Waiting for a processor does not: the
    kernel counts it per thread (second figure of ``schedstat``, in ns).

    Attributes:
        wall_seconds: how long the block took.
        own_seconds: the same without the waits for a processor of all threads of the tree, which are at most all of it.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self.wall_seconds = self.own_seconds = 0.0

    def __enter__(self) -> "Watch":
        self._waits = _waits(self._root)
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wall_seconds = time.monotonic() - self._began
        waits = _waits(self._root)
        waited = sum(max(0, after - self._waits.get(task, 0)) for task, after in waits.items()) / 1e9
        self.own_seconds = max(0.0, self.wall_seconds - waited)


def _waits(root: int) -> dict[str, int]:
    """Return for each thread of ``root`` and its descendants the ns that it has waited for a processor so far."""
    found = {}
    for pid in _tree(root):
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):  # it has just exited
                    found[task.name] = int((task / "schedstat").read_text("ascii").split()[1])
    return found


def _tree(root: int) -> Iterable[int]:
    yield root
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{root}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text("ascii").split():
                    yield from _tree(int(child))
