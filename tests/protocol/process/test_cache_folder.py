"""The folder of torch's compiler: in the user's cache, or by default if that cannot be written."""

import os
from pathlib import Path

import pytest

from quire.protocol.process.cache_folder import set_compiler_folder


def test_the_compiler_gets_a_private_folder_if_one_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is as before after the test
    for cache, expected in (("/proc/nope", None), (str(tmp_path), str(tmp_path / "quire" / "inductor"))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        set_compiler_folder()
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == expected
