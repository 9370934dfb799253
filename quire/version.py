"""The version of Quire, the commit that it was built from, and its name in package indexes."""

__version__ = "0.1.0"

DISTRIBUTION = "quire-serve"
"""Name in package indexes, where ``quire`` is another project. The import package and the command are ``quire``."""

COMMIT_FILE = "commit.txt"
"""File beside this one. ``git archive`` and builds write the commit into it; in a checkout it holds a placeholder."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for error messages."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def commit() -> str:
    """Return the commit of this installation or checkout, or "" if it is unknown. In a checkout git is asked."""
    import subprocess  # here, because every start imports this module
    from pathlib import Path

    folder = Path(__file__).resolve().parent
    try:
        written = (folder / COMMIT_FILE).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    if not written.startswith("$Format"):
        return written[:12]
    if not (folder.parent / ".git").exists():  # a copy without history, perhaps inside another project's checkout
        return ""
    command = ["git", "-C", str(folder.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version_text() -> str:
    """Return one line with the versions of Quire and of torch, which is not imported for it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"quire {__version__} (commit {commit() or 'unknown'}), torch {torch}"
