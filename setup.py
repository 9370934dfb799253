"""What pyproject.toml cannot say: where the packages lie, and the commit that a build is made from.

``quire/NAME`` is a symbolic link to the folder ``NAME`` of the repository. A zip download turns links into text files;
then the packages are taken from the folders themselves, so that a build never leaves them out.

With ``QUIRE_BUILD_AHEAD=1`` the wheel is one for this platform, with the CPU kernels compiled.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from quire.version import COMMIT_FILE, commit  # noqa: E402

BUILDS_AHEAD = os.environ.get("QUIRE_BUILD_AHEAD", "0") == "1"
FOLDERS = (
    "bench",
    "frontend",
    "kernels",
    "launch",
    "protocol",
    "replay",
    "router_proc",
    "scheduler_proc",
    "worker_proc",
)


def package_folders() -> dict[str, str]:
    """Return the folder of each top-level package, relative to the root."""
    found = {"quire": "quire"}
    for name in FOLDERS:
        places = [place for place in (f"quire/{name}", name) if (ROOT / place / "__init__.py").is_file()]
        if not places:
            sys.exit(
                f"error: the source tree is incomplete: folder {name}/ is missing, and quire/{name} does not lead "
                "to it: clone the repository, or unpack the whole archive"
            )
        found[f"quire.{name}"] = places[0]
    return found


def write_commit(folder: Path) -> None:
    file = folder / "quire" / COMMIT_FILE
    file.unlink()  # it may be a hard link to the source
    file.write_text(commit() + "\n", encoding="ascii")


def build_kernels(module: Path) -> None:
    """Compile the CPU kernels for each level of instructions. ``module``: library.py, which is no installed package."""
    spec = importlib.util.spec_from_file_location("library", module)
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    sys.modules["library"] = library  # where dataclasses look it up
    spec.loader.exec_module(library)
    compiler = library.find_compiler()
    library.PREBUILT.mkdir()
    for level in library.LEVELS:
        with tempfile.TemporaryDirectory() as scratch:
            made = library.compile_library(compiler, [*library.FLAGS, f"-march={level}"], Path(scratch))
            shutil.move(made, library.PREBUILT / f"cpu-{level}.so")


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))
            if BUILDS_AHEAD:
                build_kernels(Path(self.build_lib) / "quire/kernels/cpu/native/library.py")


class Wheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not BUILDS_AHEAD

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])  # the kernels are loaded by ctypes: for any Python


class SourceArchive(sdist):
    def make_release_tree(self, base_dir: Any, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


folders = package_folders()
setup(
    packages=["quire"]
    + [
        name
        for package, folder in folders.items()
        if package != "quire"
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(str(ROOT / folder))))
    ],
    # Without this mapping editable installs are a plain path, which type checkers and IDEs can follow.
    package_dir={} if all(folder.startswith("quire") for folder in folders.values()) else folders,
    cmdclass={"bdist_wheel": Wheel, "build_py": BuildPackages, "sdist": SourceArchive},
)
