"""Compiles the CUDA C++ beside this file into fatbins: one file with machine code for every GPU generation.

Built on first use and kept in the user's cache folder, by source and compiler; it takes the compiler but no GPU.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
ARCHITECTURES = (80, 90, 100)
"""Machine code runs on later GPUs of the same generation; the newest also as PTX, for generations to come."""

FLAGS = ("-std=c++17", "-O3", "--threads=2")
COMPILE_SECONDS = 300


class CudaBuildError(RuntimeError):
    """Why there is no fatbin, in words for a person."""


def find_nvcc() -> Path | None:
    """The compiler of $CUDA_HOME, on the PATH, or in the newest ``/usr/local/cuda*``; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    found = found or shutil.which("nvcc")
    if found:
        return Path(found)
    installed = (path for path in Path("/usr/local").glob("cuda*/bin/nvcc") if os.access(path, os.X_OK))
    return max(installed, key=_version_in_path, default=None)


def _version_in_path(nvcc: Path) -> tuple[int, ...]:
    version = nvcc.parents[1].name.removeprefix("cuda").removeprefix("-")
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def source_of(name: str) -> str:
    """``NAME.cu``, which includes nothing of ours: its text is all that its fatbin depends on."""
    return (SOURCES / f"{name}.cu").read_text()


def fatbin(name: str, folder: Path | None = None) -> bytes:
    """``NAME.cu`` compiled, from the cache or into it.

    Args:
        folder: the cache; None: ``quire`` in the user's.

    Raises:
        CudaBuildError: there is no compiler, it fails, or others may write to the cache.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise CudaBuildError(
            "no nvcc in $CUDA_HOME/bin, on the PATH or in /usr/local/cuda*/bin: install the CUDA toolkit"
        )
    folder = _cache_folder() if folder is None else folder
    version = _run([str(nvcc), "--version"])
    command = [str(nvcc), "--fatbin", *FLAGS, *_targets(nvcc)]
    digest = hashlib.sha256("\0".join([version, *command, source_of(name)]).encode())
    path = folder / f"{name}-{digest.hexdigest()[:24]}.fatbin"
    # Several workers start together and need the same file: one compiles it, and the others wait.
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / path.name
                _run([*command, "-o", str(made), str(SOURCES / f"{name}.cu")])
                made.replace(path)
    return path.read_bytes()


@functools.cache
def _targets(nvcc: Path) -> tuple[str, ...]:
    """Options for those of ``ARCHITECTURES`` that this compiler knows."""
    known = _run([str(nvcc), "--list-gpu-code"]).split()
    found = [number for number in ARCHITECTURES if f"sm_{number}" in known]
    if not found:
        raise CudaBuildError(f"{nvcc} compiles for none of sm_{', sm_'.join(map(str, ARCHITECTURES))}")
    codes = {number: f"sm_{number}" for number in found}
    codes[found[-1]] = f"[sm_{found[-1]},compute_{found[-1]}]"
    return tuple(f"-gencode=arch=compute_{number},code={code}" for number, code in codes.items())


def _cache_folder() -> Path:
    """Ours alone: what lies in it is run, so nobody else may write there."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    folder = Path(base) / "quire"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise CudaBuildError(f"{folder} can be written to by others")
    return folder


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CudaBuildError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise CudaBuildError(f"{' '.join(command[:2])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
