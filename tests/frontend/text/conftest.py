"""The chat templates of real models."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The templates that llama-cpp-python's source ships, by name."""
    folder = os.environ.get("CHAT_TEMPLATES", "")
    if folder:
        return {file.stem: file.read_text(encoding="utf-8") for file in Path(folder).glob("*.jinja")}
    kept = tmp_path_factory.mktemp("templates")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    done = subprocess.run([*pip, "llama-cpp-python", "-d", kept], capture_output=True, timeout=600, check=False)
    files = list(kept.glob("*.tar.gz"))
    if not files:
        pytest.skip(f"llama-cpp-python cannot be downloaded: {done.stderr.decode()[-200:]}")
    with tarfile.open(files[0]) as archive:
        found = (member for member in archive if "/models/templates/" in member.name and member.name.endswith(".jinja"))
        return {Path(member.name).stem: archive.extractfile(member).read().decode() for member in found}  # type: ignore[union-attr]
