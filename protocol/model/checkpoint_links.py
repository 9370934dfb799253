"""Rejects symbolic links that lead out of a checkpoint's directory."""

from pathlib import Path

from quire.protocol.errors import ConfigError

_READ = (".json", ".jinja", ".safetensors")


def check_links(folder: Path, part: str = "") -> None:
    """Reject links out of the directory, which would show files of this machine to the author of the checkpoint.

    Links of the hub's cache are allowed: its snapshots link to blobs in a directory beside them.

    Args:
        part: name of a folder in the checkpoint directory, whose files are checked; "": those of the directory itself.

    Raises:
        ConfigError: a link of a file type that is read leads elsewhere or nowhere.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    place = folder / part if part else folder
    if part and place.is_symlink():
        raise ConfigError(f"{place}: must be a folder, not a symbolic link")
    for file in sorted(place.iterdir()) if place.is_dir() else ():
        if file.suffix in _READ and file.is_symlink():
            try:
                target = file.resolve(strict=True)
            except (OSError, RuntimeError):  # RuntimeError: circular links
                raise ConfigError(f"{file}: broken symbolic link") from None
            if not target.is_relative_to(home) and target.parent != blobs:
                raise ConfigError(f"{file}: symbolic link to a file outside the checkpoint directory")
