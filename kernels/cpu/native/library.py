"""Compilation and loading of the C++ library of ``kernels/cpu``, for the CPU of this machine.

It is built on first use rather than at installation, so that one installation uses each CPU's own instructions. Where
no compiler is found, one that setup.py put into the wheel takes its place. A
failure (no compiler, no OpenMP runtime, a cache folder that other users may write to) only costs speed: ``find_native``
returns the reason instead.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("quire.worker")

SOURCES = Path(__file__).parent.parent
PREBUILT = SOURCES / "prebuilt"
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma"},
}
"""Instruction sets of libraries that are built ahead, the best first, and the flags of a CPU that has each."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
COMPILE_SECONDS = 180
_WITH_PARENT = ("sh", "-c", 'exec 3<&0; (read _; kill -9 0) <&3 & "$@" </dev/null; code=$?; kill $!; exit $code', "sh")
"""Runs a command in its process group, which is killed when standard input ends, as it does with this process."""
OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class NativeUnavailable(Exception):
    """The reason why this process runs without the library, as a readable message."""


@dataclass(frozen=True)
class Native:
    """The loaded library. Its functions do not check pointers and sizes: the caller does.

    Attributes:
        path: the shared object.
        vector_floats: float32 lanes of a register (16 with AVX-512, 8 with AVX, otherwise 4).
        has_float16: whether this CPU converts float16 in hardware.
        has_bfloat16: whether the library multiplies bfloat16 rows with instructions of this CPU.
    """

    path: Path
    library: ctypes.CDLL = field(repr=False)
    vector_floats: int
    has_float16: bool
    has_bfloat16: bool

    def function(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        """Return function ``name`` with ctypes ``arguments``. Keep the result: a lookup takes 1 µs."""
        found = self.library[name]
        found.argtypes = arguments
        found.restype = returns
        return found


# The one module global: a shared object is loaded once per process anyway.
_loaded: dict[tuple[str | None, ...], Native | str] = {}


def load_native() -> Native | None:
    """Return the library, or None if ``find_native`` returns a reason."""
    found = find_native()
    return found if isinstance(found, Native) else None


def find_native() -> Native | str:
    """Return the library, compiled first if this CPU has none yet, or the reason why it is unavailable.

    ``QUIRE_CPU_NATIVE=0`` disables it, ``CXX`` selects the compiler, ``CXXFLAGS`` adds options, and ``XDG_CACHE_HOME``
    moves the cache folder.
    """
    key = tuple(os.environ.get(name) for name in ("QUIRE_CPU_NATIVE", "CXX", "CXXFLAGS", "XDG_CACHE_HOME", "HOME"))
    if key not in _loaded:
        try:
            _loaded[key] = _load()
        except (NativeUnavailable, OSError, subprocess.SubprocessError, ValueError, RuntimeError) as error:
            _loaded[key] = str(error)  # ValueError: unbalanced quotes in options; RuntimeError: no home directory
    return _loaded[key]


def _load() -> Native:
    if os.environ.get("QUIRE_CPU_NATIVE", "1") == "0":
        raise NativeUnavailable("QUIRE_CPU_NATIVE is 0")
    import torch  # noqa: F401  (loads the OpenMP runtime that the library shares; builds of a wheel have none)

    runtime = _openmp_runtime()
    try:
        compiler = find_compiler()
    except NativeUnavailable:
        path = _prebuilt()
        if path is None:
            raise
    else:
        path = _build(compiler)
    # RTLD_GLOBAL, so that the library, which is not linked against OpenMP, finds its symbols in torch's runtime. A
    # second runtime would start its own threads on the same cores.
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    converts, multiplies = bool(library.quire_has_float16()), bool(library.quire_has_bf16())
    return Native(path, library, library.quire_vector_floats(), converts, multiplies)


def _openmp_runtime() -> str:
    """Return the path of the OpenMP runtime that torch has mapped; its file name depends on the wheel."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        raise NativeUnavailable(f"not supported on {platform.system()}")
    files = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/") > 0}
    for name in OPENMP_RUNTIMES:
        for file in sorted(files):
            if Path(file).name.startswith(name):
                return file
    raise NativeUnavailable("this torch was built without OpenMP")


def find_compiler() -> list[str]:
    """Return the command of the compiler. Raises NativeUnavailable if there is none."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise NativeUnavailable(f"CXX={wanted[0]}: compiler not found")
        return wanted
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return [found]
    raise NativeUnavailable("no C++ compiler found: install g++ for faster steps")


def _prebuilt() -> Path | None:
    """Return the best library built ahead that this CPU can run, or None."""
    has = set(_cpu_flags().split())
    found = (PREBUILT / f"cpu-{level}.so" for level, needed in LEVELS.items() if needed <= has)
    return next((path for path in found if path.exists()), None)


def _build(compiler: list[str]) -> Path:
    """Return the library for these sources, compiler and CPU, from the cache or compiled into it."""
    cpu = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [*FLAGS, cpu, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    folder = _cache_folder()
    path = folder / f"cpu-{_fingerprint(compiler, flags)}.so"
    if path.exists():
        return path
    with _locked(folder / "cpu.lock"):
        if not path.exists():
            log.warning("compiling the CPU kernels for this machine; later starts reuse them directory=%s", folder)
            scratch = folder / "scratch"  # under the lock it is that of a killed process
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700)
            try:
                compile_library(compiler, flags, scratch).replace(path)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return path


def _cache_folder() -> Path:
    """Return the cache folder. Its files are executed, so other users must not have write access."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    folder = Path(base) / "quire"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise NativeUnavailable(f"cache folder {folder} is writable by other users")
    return folder


def _fingerprint(compiler: list[str], flags: list[str]) -> str:
    """Hash everything that a build depends on, the CPU included: machines with different CPUs may share the cache."""
    digest = hashlib.sha256("\0".join([*compiler, *flags, _cpu_flags()]).encode())
    digest.update(_run([*compiler, "--version"]).encode())
    for file in _sources(".cpp", ".h"):
        digest.update(str(file.relative_to(SOURCES)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kept = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


def compile_library(compiler: list[str], flags: list[str], scratch: Path) -> Path:
    """Compile each source in its own process, then link, without OpenMP (see ``_load``). Return a file in ``scratch``.

    Raises:
        NativeUnavailable: the compiler failed, or took longer than ``COMPILE_SECONDS`` for a source.
    """
    lifeline, ours = os.pipe()

    def compile_one(source: Path) -> str:
        """Return the object file."""
        made = scratch / f"{source.parent.name}-{source.stem}.o"
        command = [*_WITH_PARENT, *compiler, *flags, "-I", str(SOURCES), "-c", str(source), "-o", str(made)]
        quiet, kept = subprocess.DEVNULL, subprocess.PIPE
        process = subprocess.Popen(command, stdin=lifeline, stdout=quiet, stderr=kept, text=True, process_group=0)
        try:
            error = process.communicate(timeout=COMPILE_SECONDS)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            error = process.communicate()[1] + f"timed out after {COMPILE_SECONDS} s"
        if process.returncode:
            lines = [line for line in error.splitlines() if "error" in line] or error.splitlines() or ["no message"]
            raise NativeUnavailable(f"{compiler[0]} failed: {lines[0]}")
        return str(made)

    # As many at a time as there are cores: all at once would need gigabytes, and each would take as long as all.
    # After a failure ``ours`` is closed before the pool waits for its threads, which ends the other compilers.
    with os.fdopen(lifeline), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, os.fdopen(ours, "w"):
        objects = list(pool.map(compile_one, _sources(".cpp")))
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
    return sorted(file for file in SOURCES.glob("*/*") if file.suffix in suffixes)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file exclusively: several workers start at the same time and need the same build."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
