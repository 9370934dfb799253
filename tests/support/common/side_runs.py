"""The longest tests run as programs of their own. In a session of one process they start with the session and run
beside the other tests, which keep one core busy; their tests run last and check the output. Where several processes
share the tests and keep the cores busy, a program starts with its test."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
GRID = sorted(path for path in (TESTS / "kernels" / "grid").rglob("*.py") if path.name != "conftest.py")
INTERPRETED = TESTS / "worker_proc" / "interpreted"
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]

# A process in Triton's interpreter cannot compile, and one that compiles cannot interpret.
PROGRAMS: dict[str, tuple[list[str | Path], dict[str, str]]] = {
    "test_kernels_compile_ahead_of_time": ([TESTS / "kernels" / "compile_ahead.py", "--capabilities", "90"], {}),
    "test_kernels_compile_ahead_of_time_for_other_gpu_generations": (
        [TESTS / "kernels" / "compile_ahead.py", "--capabilities", "80,100"],
        {},
    ),
    "test_first_cases_in_the_interpreter": (
        [*PYTEST, *GRID, "--cases", "first", "-k", "equals_reference or (rows and not pieces)"],
        {"TRITON_INTERPRET": "1"},
    ),
    "test_grid_in_the_interpreter": ([*PYTEST, *GRID, "--cases", "even"], {"TRITON_INTERPRET": "1"}),
    "test_rest_of_the_grid_in_the_interpreter": ([*PYTEST, *GRID, "--cases", "odd"], {"TRITON_INTERPRET": "1"}),
    "test_decode_step_in_the_interpreter": (
        [*PYTEST, INTERPRETED / "decode_step.py", INTERPRETED / "draw.py"],
        {"TRITON_INTERPRET": "1"},
    ),
    "test_gpu_blocks_in_the_interpreter": ([*PYTEST, INTERPRETED / "gpu_blocks.py"], {"TRITON_INTERPRET": "1"}),
}
"""Programs by the name of the test that checks their output."""

TIMEOUT_S = 900


class SideRuns:
    """Owns the running programs and a folder for their output and compiled files."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-tests-")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, names: Iterable[str]) -> None:
        if importlib.util.find_spec("triton") is None:
            return
        for name in names:
            if name in PROGRAMS and name not in self._running:
                self._running[name] = self._spawn(name, *PROGRAMS[name])

    def output(self, name: str) -> str:
        """Return the output of the program after it has exited with status 0."""
        self.start([name])
        status = self._running[name].wait(TIMEOUT_S)
        printed = self._file(name).read_text(encoding="utf-8", errors="replace")
        assert status == 0, printed
        return printed

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _file(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.txt"

    def _spawn(self, name: str, arguments: list[str | Path], variables: dict[str, str]) -> "subprocess.Popen[bytes]":
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": f"{self._folder.name}/{name}", "OMP_NUM_THREADS": "1"} | variables
        with self._file(name).open("wb") as out:
            # -P: a top-level `kernels` or `protocol` of the current folder must not be importable.
            return subprocess.Popen(
                [sys.executable, "-P", *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT
            )
