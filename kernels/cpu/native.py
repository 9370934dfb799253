"""Compiles the C++ beside this file for the CPU it runs on, and loads it.

Built on first use rather than when Quire is installed, so that one installation serves every CPU with its own
instructions. Whatever fails (no compiler, no OpenMP runtime, a cache folder that others may write to) costs speed only:
``find_native`` returns the reason instead.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (brings the OpenMP runtime that the library must share)

log = logging.getLogger("quire.worker")

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
COMPILE_SECONDS = 180
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class NativeUnavailable(Exception):
    """Why this process runs without the library, in words for a person."""


@dataclass(frozen=True)
class Native:
    """The loaded library. Its functions take pointers and sizes as they come: the caller checks.

    Attributes:
        path: the shared object.
        vector_floats: float32 lanes of a register (16 with AVX-512, 8 with AVX, else 4).
        has_float16: this CPU widens float16 in hardware.
    """

    path: Path
    library: ctypes.CDLL = field(repr=False)
    vector_floats: int
    has_float16: bool

    def function(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        """The library's function ``name`` with ctypes ``arguments``; look it up once and keep it: a call takes 1 µs."""
        found = self.library[name]
        found.argtypes = arguments
        found.restype = returns
        return found


# A shared object is loaded once per process whatever we do, so its handle is the one thing found rather than passed.
_loaded: dict[tuple[str | None, ...], Native | str] = {}


def load_native() -> Native | None:
    """Return the library, or None where ``find_native`` gives a reason instead."""
    found = find_native()
    return found if isinstance(found, Native) else None


def find_native() -> Native | str:
    """Return the library, compiled first if this CPU has none yet, or the reason why it is unavailable.

    ``QUIRE_CPU_NATIVE=0`` disables it, ``CXX`` names another compiler, ``CXXFLAGS`` adds to its options, and
    ``XDG_CACHE_HOME`` moves the build.
    """
    key = tuple(os.environ.get(name) for name in ("QUIRE_CPU_NATIVE", "CXX", "CXXFLAGS", "XDG_CACHE_HOME", "HOME"))
    if key not in _loaded:
        try:
            _loaded[key] = _load()
        except (NativeUnavailable, OSError, subprocess.SubprocessError, ValueError, RuntimeError) as error:
            _loaded[key] = str(error)  # the last two: options that no shell would read, no home directory
    return _loaded[key]


def _load() -> Native:
    if os.environ.get("QUIRE_CPU_NATIVE", "1") == "0":
        raise NativeUnavailable("QUIRE_CPU_NATIVE is 0")
    runtime = _openmp_runtime()
    path = _build(_compiler())
    # Global, so that the library's OpenMP symbols, which it is not linked against, are found in torch's own runtime:
    # a second one would start threads of its own on the same cores.
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    return Native(path, library, library.quire_vector_floats(), bool(library.quire_has_float16()))


def _openmp_runtime() -> str:
    """The runtime that torch has mapped, whatever its wheel calls the file."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        raise NativeUnavailable(f"not supported on {platform.system()}")
    files = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/") > 0}
    for name in OPENMP_RUNTIMES:
        for file in sorted(files):
            if Path(file).name.startswith(name):
                return file
    raise NativeUnavailable("this torch was built without OpenMP")


def _compiler() -> list[str]:
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise NativeUnavailable(f"CXX names {wanted[0]}, which is not there")
        return wanted
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    raise NativeUnavailable("no C++ compiler (install g++ for faster steps)")


def _build(compiler: list[str]) -> Path:
    """The library for these sources, this compiler and this CPU, from the cache or compiled into it."""
    cpu = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [*FLAGS, cpu, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    folder = _cache_folder()
    path = folder / f"cpu-{_fingerprint(compiler, flags)}.so"
    if path.exists():
        return path
    with _locked(folder / "cpu.lock"):
        if not path.exists():
            log.warning("compiling the CPU kernels for this machine; later starts reuse them directory=%s", folder)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                built = _compile(compiler, flags, Path(scratch))
                built.replace(path)
    return path


def _cache_folder() -> Path:
    """Ours alone: what lies in it is run, so nobody else may write there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    folder = Path(base) / "quire"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise NativeUnavailable(f"{folder} can be written to by others")
    return folder


def _fingerprint(compiler: list[str], flags: list[str]) -> str:
    """Names a build by all that it depends on; a home directory may be shared by machines with different CPUs."""
    digest = hashlib.sha256("\0".join([*compiler, *flags, _cpu_flags()]).encode())
    digest.update(_run([*compiler, "--version"]).encode())
    for file in _sources(".cpp", ".h"):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kept = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def _compile(compiler: list[str], flags: list[str], scratch: Path) -> Path:
    """Each source by its own process, then the link, without OpenMP: see ``_load``."""
    objects, running = [], []
    for source in _sources(".cpp"):
        made = scratch / f"{source.stem}.o"
        command = [*compiler, *flags, "-c", str(source), "-o", str(made)]
        objects.append(str(made))
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    errors = []
    for process in running:
        try:
            errors.append(process.communicate(timeout=COMPILE_SECONDS)[1])
        except subprocess.TimeoutExpired:
            process.kill()
            errors.append(process.communicate()[1] + f"took longer than {COMPILE_SECONDS} s")
    for process, error in zip(running, errors, strict=True):
        if process.returncode:
            lines = [line for line in error.splitlines() if "error" in line] or error.splitlines() or ["no message"]
            raise NativeUnavailable(f"{compiler[0]} failed: {lines[0]}")
    built = scratch / "built.so"
    _run([*compiler, "-shared", *objects, "-o", str(built)])
    built.chmod(0o700)
    return built


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
    )
    if done.returncode:
        raise NativeUnavailable(f"{' '.join(command[:2])} failed: {(done.stderr.splitlines() or ['no message'])[0]}")
    return done.stdout


def _sources(*suffixes: str) -> list[Path]:
    return sorted(file for file in SOURCES.iterdir() if file.suffix in suffixes)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time: several workers start together and need the same file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
