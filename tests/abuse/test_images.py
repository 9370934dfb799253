"""Damaged images and URLs that lead inside; tests/nightly/acceptance/fuzz_images.py sends thousands of them."""

import os
from pathlib import Path

import pytest
from image_attacks import attack_with_files, attack_with_urls
from image_files import bombs, mutations, not_images, whole_files
from image_hosts import hostile_urls, world

from quire.frontend.images.options import ImageOptions
from quire.frontend.images.reader import ImageReader
from quire.frontend.images.store import ItemStore

pytestmark = pytest.mark.full


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(support / name) for name in ("common", "abuse")))
    store = ItemStore(2**24, tmp_path)
    reader = ImageReader("folder", 7, ImageOptions(image_processes=1), store, "odd_image_helper")
    files = [*whole_files().values(), *bombs().values(), *not_images().values(), *mutations(110, seed=1)]
    found = attack_with_files(reader, files)
    assert sum(found.values()) - found["slowest_ms"] >= 150 and found["read"] >= len(whole_files())
    assert not any("busy" in reason for reason in found)
    reader.close()
    store.close()
    assert not list(tmp_path.iterdir())


def test_urls_that_lead_inside() -> None:
    with world() as server:
        found = attack_with_urls(server, hostile_urls()[::5])
    assert found.total() >= 40
