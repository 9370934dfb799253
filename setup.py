"""What pyproject.toml cannot say: where the packages lie, and the commit that a build is made from.

``quire/NAME`` is a symbolic link to the folder ``NAME`` of the repository. A zip download turns links into text files;
then the packages are taken from the folders themselves, so that a build never leaves them out.
"""

import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from quire.version import COMMIT_FILE, commit  # noqa: E402

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


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


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
    cmdclass={"build_py": BuildPackages, "sdist": SourceArchive},
)
