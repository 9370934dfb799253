"""Images of requests: one run per content, files as long as their objects, and what a bad image or helper costs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_files import data_url, image_file
from safetensors.numpy import load_file

from quire.frontend.images.image_helper import Hello, ImageHelper
from quire.frontend.images.options import ImageOptions
from quire.frontend.images.reader import ImageReader
from quire.frontend.images.refused import Refused
from quire.frontend.images.source import ImageSource, StoredItem
from quire.frontend.images.store import ItemStore
from quire.protocol.errors import InvalidRequest
from quire.protocol.process.owned_folder import LOCK

WHERE = "messages[0].content[1].image_url.url"
MODULE = "odd_image_helper"
OPTIONS = ImageOptions(max_images_per_prompt=4, max_image_bytes=20_000, max_image_pixels=10_000, image_processes=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ItemStore]:
    store = ItemStore(2**20, tmp_path_factory.mktemp("items"))
    yield store
    store.close()


@pytest.fixture(scope="module", autouse=True)
def paths_of_helpers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folders = Path(__file__).parents[2] / "support"
        patch.setenv("PYTHONPATH", os.pathsep.join(str(folders / name) for name in ("common", "abuse")))
        yield


@pytest.fixture(scope="module")
def reader(store: ItemStore) -> Iterator[ImageReader]:
    reader = ImageReader("folder", 7, OPTIONS, store, MODULE)
    yield reader
    reader.close()


def files_of(image: StoredItem) -> set[str]:
    """Return the paths of all files in the folder of an image."""
    return {str(file) for file in Path(image.path).parent.iterdir()}


def width(image: StoredItem) -> int:
    """Return the width of an image of ``odd_image_helper``, whose file has the pixels."""
    return int(load_file(image.path)["pixel_values"].shape[1])


def source(data: bytes = b"", url: str = "") -> ImageSource:
    return ImageSource(WHERE, url or data_url(data))


def read(reader: ImageReader, *data: bytes) -> list[StoredItem]:
    return reader.read_now([source(each) for each in data])


def test_images_are_read_in_order(reader: ImageReader) -> None:
    files = [image_file("PNG", (10 + each, 20)) for each in range(3)]
    assert [width(image) for image in read(reader, *files)] == [10, 11, 12]
    urls = [
        source(url=data_url(file, kind))
        for file, kind in zip(files, ("image/jpeg", "IMAGE/x;a=b", "image/png"), strict=True)
    ]
    images = asyncio.run(reader.read(urls))
    assert [width(image) for image in images] == [10, 11, 12]
    assert images[0].num_bytes == Path(images[0].path).stat().st_size and images[0].placeholder == "<image>"
    assert reader.read_now([]) == []


def test_equal_images_are_one_object(reader: ImageReader, store: ItemStore) -> None:
    """Of equal files one is processed; equal pixels in other files share an object, too."""
    before = files_of(read(reader, image_file("GIF"))[0])
    first, second, third = read(reader, *[image_file("PNG", (7, 7))] * 2, image_file("PNG", (7, 7), compress_level=0))
    assert first is second is third
    assert files_of(first) == before | {first.path}


def test_file_lives_as_long_as_the_last_reference(reader: ImageReader, store: ItemStore) -> None:
    [image] = read(reader, image_file())
    path, other = Path(image.path), image
    for each in range(12):  # a quarter of the memory is for images that no request has
        read(reader, image_file("PNG", (99, 99 - each)))
    del image
    assert path.exists() and Path(other.path).exists()
    del other
    assert not path.exists()
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 2**20 // 4


def test_the_next_turn_finds_its_images(reader: ImageReader) -> None:
    [path] = [image.path for image in read(reader, image_file())]
    assert [image.path for image in read(reader, image_file())] == [path]


def test_full_memory(reader: ImageReader) -> None:
    held, number = [], 0
    with pytest.raises(InvalidRequest, match="images of other requests fill the memory") as caught:
        for number in range(100):
            held += read(reader, image_file("PNG", (99, 99 - number)))
    assert caught.value.code == "queue_full" and number > 30
    held.clear()
    assert read(reader, image_file())


BAD = {
    "no image": (source(b"hello"), "must be an image file: PNG, JPEG, WEBP, GIF or BMP"),
    "pixels": (source(image_file("PNG", (101, 100))), r"must be an image of at most 10000 pixels \(got 101 x 100\)"),
    "bytes": (source(bytes(20_010)), r"must have at most 20000 bytes \(got about 20010\)"),
    "no base64": (source(url="data:image/png;base64,%%"), "must have standard base64 with padding"),
    "not base64": (source(url="data:image/png,abc"), "must be a data URL of the form data:image/TYPE;base64,..."),
    "long head": (source(url=f"data:image/png{';a=b' * 500};base64,AAAA"), "must be a data URL of the form"),
    "another type": (source(url="data:text/html;base64,AAAA"), "must be a data URL of the form"),
    "http": (source(url="http://x/"), r"must be a data: URL, because the server fetches no images \(--allowed"),
    "path": (source(url="/etc/passwd"), "must be a data: URL"),
    "crash": (source(b"!die 11"), "must be an image that can be decoded in bounded memory"),
    "memory": (source(b"!take 999999999"), "must be an image that can be decoded in bounded memory"),
    "abort": (source(b"!die 6"), "must be an image that can be decoded in bounded memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str, reader: ImageReader, store: ItemStore) -> None:
    """A bad image ends its request; the others of the pool are read, and no file is left."""
    bad, reason = BAD[name]
    [image] = read(reader, image_file())
    before = files_of(image)
    with pytest.raises(InvalidRequest, match=f"^messages.0..content.1..image_url.url {reason}") as caught:
        reader.read_now([bad])
    assert caught.value.param == WHERE and caught.value.code == "invalid_value"
    [after] = read(reader, image_file("PNG", (8, 8)))
    assert files_of(after) == before | {after.path}


def test_too_many_images(reader: ImageReader) -> None:
    with pytest.raises(InvalidRequest, match=r"at most 4 images \(got 5\): --max-images-per-prompt"):
        read(reader, *[image_file()] * 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_helper_killed_from_outside(number: int, reader: ImageReader) -> None:
    """The image is not the cause: its client may try again."""
    with pytest.raises(InvalidRequest, match="the server is too busy: retry later") as caught:
        read(reader, f"!die {number}".encode())
    assert caught.value.code == "queue_full"
    assert read(reader, image_file())


@pytest.mark.full
def test_crash_of_another_cause_is_not_noticed(reader: ImageReader, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(image_file())
    assert width(read(reader, f"!once {tmp_path / 'marker'}".encode())[0]) == 40


def test_no_room_for_a_file(reader: ImageReader) -> None:
    with pytest.raises(InvalidRequest, match="too busy") as caught:
        read(reader, b"!full")
    assert caught.value.code == "queue_full"


@pytest.mark.full
def test_endless_image(tmp_path: Path) -> None:
    helper = ImageHelper(Hello("folder", 7, 10_000), MODULE, cpu_seconds=0.1)
    with pytest.raises(Refused, match="must be an image that can be decoded in bounded time"):
        helper.prepare(b"!spin", str(tmp_path / "file"))
    assert width(helper.prepare(image_file(), str(tmp_path / "file"))) == 40
    helper.close()


@pytest.mark.full
def test_no_processor(store: ItemStore) -> None:
    reader = ImageReader("none", 7, OPTIONS, store, MODULE)
    reader.prepare()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="cannot be read: no processor"):
            read(reader, image_file("PNG", (6, 6)))
    reader.close()


def test_request_that_is_cancelled(reader: ImageReader) -> None:
    """Its images that wait are dropped, and those of others are read."""

    async def cancel() -> None:
        task = asyncio.create_task(
            reader.read([source(b"!die 11"), *[source(image_file("PNG", (9, each))) for each in (7, 8)]])
        )
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert read(reader, image_file())


@pytest.mark.full
def test_closing_ends_what_waits(store: ItemStore) -> None:
    reader = ImageReader("folder", 7, OPTIONS, store, MODULE)

    async def close() -> None:
        task = asyncio.create_task(reader.read([source(b"!sleep")]))
        await asyncio.sleep(0)
        await asyncio.to_thread(reader.close)
        with pytest.raises((InvalidRequest, asyncio.CancelledError)):
            await task

    asyncio.run(close())


class TestFolders:
    def test_folder_of_a_living_process_stays(self, tmp_path: Path) -> None:
        stores = [ItemStore(2**20, tmp_path) for _ in range(2)]
        assert len(list(tmp_path.iterdir())) == 2
        assert (next(tmp_path.iterdir()).stat().st_mode & 0o777) == 0o700
        for store in stores:
            store.close()
        assert not list(tmp_path.iterdir())

    def test_folder_of_a_killed_process_is_removed(self, tmp_path: Path) -> None:
        left = tmp_path / "quire-items-left"
        left.mkdir()
        (left / "1").write_bytes(b"x")
        (left / LOCK).touch()
        (tmp_path / "quire-items-link").symlink_to(tmp_path)
        (tmp_path / "other").mkdir()
        ItemStore(2**20, tmp_path).close()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "quire-items-link"]

    def test_forked_process_removes_nothing(self, store: ItemStore, reader: ImageReader) -> None:
        [image] = read(reader, image_file())
        child = os.fork()
        if not child:
            store.close()
            del image
            os._exit(0)
        os.waitpid(child, 0)
        assert Path(image.path).exists()
