"""Links in a checkpoint's folder must not lead out of it."""

from pathlib import Path

from quire.protocol.errors import ConfigError

_READ = (".json", ".jinja", ".safetensors")


def check_links(folder: Path) -> None:
    """A link out of the folder would show files of this machine to the author of the checkpoint.

    The hub's cache is the exception: there, snapshots link to the blobs beside them.

    Raises:
        ConfigError: a file that might be read lies elsewhere.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in _READ and file.is_symlink():
            try:
                place = file.resolve(strict=True)
            except (OSError, RuntimeError):  # RuntimeError: links in a circle
                raise ConfigError(f"{file}: is a link to nothing") from None
            if not place.is_relative_to(home) and place.parent != blobs:
                raise ConfigError(f"{file}: is a link to a file outside of the checkpoint's folder")
