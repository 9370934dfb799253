"""The processes of engines that this test process has started."""

import psutil

SHARED: set[int] = set()
"""Servers that many tests use one after the other: theirs are nobody's here."""


def engine_processes(module: str = "quire.") -> list[psutil.Process]:
    """Descendants that run ``module``; a name that ends with a dot stands for all that begin so.

    What has ended does not count, nor does a server in SHARED with all its processes.
    """
    me = psutil.Process()
    found = [process for process in me.children(recursive=True) if _runs(process, module)]
    kept = {process.pid for pid in SHARED for process in _family(pid)}
    return [process for process in found if process.pid not in kept]


def processes_of(server: int, module: str) -> list[psutil.Process]:
    """Those of one server, whoever else uses it, that run ``module``."""
    return [process for process in _family(server) if _runs(process, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # it has ended
        return False
    return any(word == module or (module.endswith(".") and word.startswith(module)) for word in words)


def _family(pid: int) -> list[psutil.Process]:
    try:
        server = psutil.Process(pid)
        return [server, *server.children(recursive=True)]
    except psutil.Error:
        return []
