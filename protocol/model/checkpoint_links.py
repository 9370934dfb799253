"""Rejects symbolic links that lead out of a checkpoint's directory."""

from pathlib import Path

from quire.protocol.errors import ConfigError

_READ = (".json", ".jinja", ".safetensors")


def check_links(folder: Path) -> None:
    """Reject links out of the directory, which would show files of this machine to the author of the checkpoint.

    Links of the hub's cache are allowed: its snapshots link to blobs in a directory beside them.

    Raises:
        ConfigError: a link of a file type that is read leads elsewhere or nowhere.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in _READ and file.is_symlink():
            try:
                place = file.resolve(strict=True)
            except (OSError, RuntimeError):  # RuntimeError: circular links
                raise ConfigError(f"{file}: broken symbolic link") from None
            if not place.is_relative_to(home) and place.parent != blobs:
                raise ConfigError(f"{file}: symbolic link to a file outside the checkpoint directory")
