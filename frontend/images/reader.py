"""From the images of requests to stored images, in threads that wait for fetches and helper processes."""

import asyncio
import hashlib
import queue
import re
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from quire.frontend.images.base64_text import decode_base64
from quire.frontend.images.fetch import Fetcher
from quire.frontend.images.image_helper import MODULE, Hello, ImageHelper
from quire.frontend.images.options import ImageOptions
from quire.frontend.images.refused import Refused
from quire.frontend.images.source import ImageSource, StoredImage
from quire.frontend.images.store import ItemStore, remove_file
from quire.protocol.errors import InvalidRequest, counted
from quire.protocol.process.helper import HelperDied
from quire.protocol.process.log import event_logger

MAX_WAITING = 1024
"""Images that wait or are read at a time; requests with more are refused until some are done."""
NUM_FETCHES = 16
_DATA_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64", re.IGNORECASE | re.ASCII)

log = event_logger("images")


class HelperReader:
    """Reads images for one model (an ``ImageReader``). Owns the helpers, which are started as they are needed."""

    def __init__(
        self, model_path: str, token_id: int, options: ImageOptions, store: ItemStore, module: str = MODULE
    ) -> None:
        """Args:
        model_path: folder of the checkpoint.
        token_id: token whose positions take rows of an image.
        module: of the helper processes.
        """
        self._options = options
        self._store = store
        hello = Hello(model_path, token_id, options.max_pixels)
        self._helpers = [ImageHelper(hello, module) for _ in range(options.helpers)]
        self._idle: queue.LifoQueue[ImageHelper] = queue.LifoQueue()  # so that a light load uses few of them
        for helper in self._helpers:
            self._idle.put(helper)
        # Fetches have threads of their own: slow hosts do not delay images that are here.
        domains = options.domains
        self._fetcher = Fetcher(domains, options.max_bytes) if domains else None
        self._threads = ThreadPoolExecutor(2 * options.helpers, "images")
        self._fetches = ThreadPoolExecutor(NUM_FETCHES, "fetched images")
        self._lock = threading.Lock()
        self._reading: dict[bytes, Future[StoredImage]] = {}
        self._num_waiting = 0

    async def read(self, sources: Sequence[ImageSource]) -> list[StoredImage]:
        futures = self._submit(sources)
        try:
            return [await asyncio.wrap_future(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def read_now(self, sources: Sequence[ImageSource]) -> list[StoredImage]:
        futures = self._submit(sources)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def prepare(self) -> None:
        """Start a helper, so that the first image does not wait for it. Log why images cannot be read, if so."""
        helper = self._idle.get()
        try:
            helper.start()
        except Refused as refused:
            log.warning(f"images {refused.text}")
        except HelperDied:
            pass  # the first image reports it
        finally:
            self._idle.put(helper)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fetches.shutdown(wait=False, cancel_futures=True)
        for helper in self._helpers:
            helper.kill()
        idle = []
        with suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for helper in idle:
            helper.close()
            self._idle.put(helper)  # a thread that comes late gets Refused of it

    def _submit(self, sources: Sequence[ImageSource]) -> list[Future[StoredImage]]:
        most = self._options.max_images
        if len(sources) > most:
            text = f"a prompt may have at most {counted(most, 'image')} (got {len(sources)}): --max-images-per-prompt"
            raise InvalidRequest(text, sources[most].where)
        with self._lock:
            if sources and self._num_waiting + len(sources) > max(MAX_WAITING, len(sources)):
                text = "too many images are waiting to be read: retry later"
                raise InvalidRequest(text, sources[0].where, "queue_full")
            self._num_waiting += len(sources)
        futures = []
        for source in sources:
            is_remote = source.data is None and source.url[:4].lower() == "http"
            future = (self._fetches if is_remote else self._threads).submit(self._read, source)
            future.add_done_callback(self._note_done)
            futures.append(future)
        return futures

    def _note_done(self, future: Future[StoredImage]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _read(self, source: ImageSource) -> StoredImage:
        try:
            return self._stored(self._content(source))
        except Refused as refused:
            raise refused.about(source.where) from None

    def _content(self, source: ImageSource) -> bytes:
        """Return the bytes of an image's file."""
        most = self._options.max_bytes
        if source.data is not None:
            content = source.data
        elif source.url[:5].lower() == "data:":
            content = _decoded(source.url, most)
        elif self._fetcher is not None:
            content = self._fetcher.fetch(source.url)
        else:
            raise Refused("must be a data: URL, because the server fetches no images (--allowed-media-domains)")
        if len(content) > most:
            raise Refused(f"must be a file of at most {most} bytes (got {len(content)})")
        return content

    def _stored(self, data: bytes) -> StoredImage:
        """Return the stored image of a file, after at most one run of the processor for all that ask at a time."""
        content = hashlib.sha256(data).digest()
        with self._lock:
            reading = self._reading.get(content)
            if reading is None:
                own = self._reading[content] = Future()
        if reading is not None:
            return reading.result()
        try:
            own.set_result(self._store.known(content) or self._prepared(content, data))
        except BaseException as error:
            own.set_exception(error)
        finally:
            with self._lock:
                del self._reading[content]
        return own.result()

    def _prepared(self, content: bytes, data: bytes) -> StoredImage:
        path = self._store.new_path()
        helper = self._idle.get()
        try:
            made = helper.prepare(data, path)
        except BaseException:
            remove_file(path)
            raise
        finally:
            self._idle.put(helper)
        sizes = (made.width, made.height, made.num_bytes)
        stored = StoredImage(made.digest, path, made.expansion, made.num_rows, made.grid, *sizes, made.placeholder)
        return self._store.add_image(content, stored)


def _decoded(url: str, most: int) -> bytes:
    """Return the content of a data URL with at most ``most`` bytes."""
    head, _, body = url.partition(",")
    if not _DATA_URL.fullmatch(head):
        raise Refused("must be a data URL of the form data:image/TYPE;base64,...")
    return decode_base64(body, most)
