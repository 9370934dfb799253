"""The processes of engines that this test process has started."""

import psutil


def engine_processes(module: str = "quire.") -> list[psutil.Process]:
    """Descendants that run a module whose name begins so; what has ended does not count."""
    return [process for process in psutil.Process().children(recursive=True) if module in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""
