"""The engine processes that this test process has started."""

import psutil

SHARED: set[int] = set()
"""Servers that several tests share; ``engine_processes`` leaves out their processes."""


def engine_processes(module: str = "quire.") -> list[psutil.Process]:
    """Return running descendants of this process that run ``module``; a name that ends with a dot matches every module
    below it. Exited processes, the servers in SHARED and their descendants are left out."""
    me = psutil.Process()
    found = [process for process in me.children(recursive=True) if _runs(process, module)]
    kept = {process.pid for pid in SHARED for process in _family(pid)}
    return [process for process in found if process.pid not in kept]


def processes_of(server: int, module: str) -> list[psutil.Process]:
    """Return the processes of one server that run ``module``, even if it is in SHARED."""
    return [process for process in _family(server) if _runs(process, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # it has exited
        return False
    return any(word == module or (module.endswith(".") and word.startswith(module)) for word in words)


def _family(pid: int) -> list[psutil.Process]:
    try:
        server = psutil.Process(pid)
        return [server, *server.children(recursive=True)]
    except psutil.Error:
        return []
