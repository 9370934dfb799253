"""From the images of requests to stored images, in threads that wait for fetches and helper processes."""

import asyncio
import hashlib
import queue
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quire.frontend.images.fetch import Fetcher
from quire.frontend.images.image_helper import MODULE, Hello, ImageHelper
from quire.frontend.images.options import ImageOptions
from quire.frontend.images.refused import Refused
from quire.frontend.images.source import ImageSource, StoredItem, check_base64
from quire.frontend.images.store import ItemStore
from quire.protocol.errors import InvalidRequest, counted
from quire.protocol.process.helper import HelperDied
from quire.protocol.process.host_limits import usable_cores
from quire.protocol.process.log import event_logger

MAX_WAITING = 1024
"""Images that wait or are read at a time; requests with more are refused until some are done."""
NUM_FETCHES = 16
MAX_HEAD_CHARS = 1024
"""Of a data URL: what is before its content."""
_DATA_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE | re.ASCII)

log = event_logger("images")


class ImageReader:
    """Reads the images of requests for one model. Thread-safe. Owns the helpers, which start as they are needed."""

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
        hello = Hello(model_path, token_id, options.max_image_pixels)
        self._idle: queue.LifoQueue[ImageHelper] = queue.LifoQueue()  # so that a light load uses few of them
        num_helpers = options.image_processes or min(4, usable_cores())
        self._helpers = [ImageHelper(hello, module) for _ in range(num_helpers)]
        for helper in self._helpers:
            self._idle.put(helper)
        domains = options.allowed_media_domains
        self._fetcher = Fetcher(domains, options.max_image_bytes) if domains else None
        self._threads = ThreadPoolExecutor(2 * num_helpers, "images")
        # Fetches have threads of their own: slow hosts do not delay images that are here.
        self._fetches = ThreadPoolExecutor(NUM_FETCHES, "fetched images")
        self._waiting: set[Future[StoredItem]] = set()
        self._reading: dict[bytes, Future[StoredItem]] = {}

    async def read(self, sources: Sequence[ImageSource]) -> list[StoredItem]:
        """Return the images in order. They are fetched, decoded and processed beside the event loop.

        Raises:
            InvalidRequest: one cannot be used, or the server is too busy (code ``queue_full``). It names the field.
        """
        with self._submitted(sources) as futures:
            return [await asyncio.wrap_future(future) for future in futures]

    def read_now(self, sources: Sequence[ImageSource]) -> list[StoredItem]:
        """Do the same, but block this thread."""
        with self._submitted(sources) as futures:
            return [future.result() for future in futures]

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
        """End the helpers. Images that wait are refused; stored ones stay."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fetches.shutdown(wait=False, cancel_futures=True)
        for helper in self._helpers:
            helper.kill()
        idle = [self._idle.get() for _ in self._helpers]  # their threads notice, and give them back
        for helper in idle:
            helper.close()
            self._idle.put(helper)  # for a thread that comes late, such as one that fetches

    @contextmanager
    def _submitted(self, sources: Sequence[ImageSource]) -> Iterator[list[Future[StoredItem]]]:
        most = self._options.max_images_per_prompt
        if len(sources) > most:
            text = f"a prompt may have at most {counted(most, 'image')} (got {len(sources)}): --max-images-per-prompt"
            raise InvalidRequest(text, sources[most].where)
        if sources and len(self._waiting) + len(sources) > max(MAX_WAITING, len(sources)):
            text = "too many images are waiting to be read: retry later"
            raise InvalidRequest(text, sources[0].where, "queue_full")
        futures = []
        for source in sources:
            is_remote = source.url[:4].lower() == "http"
            future = (self._fetches if is_remote else self._threads).submit(self._read, source)
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)
            futures.append(future)
        try:
            yield futures
        finally:
            for future in futures:
                future.cancel()

    def _read(self, source: ImageSource) -> StoredItem:
        try:
            return self._stored(self._content(source.url))
        except Refused as refused:
            raise refused.about(source.where) from None

    def _content(self, url: str) -> bytes:
        """Return a data URL, which helpers decode: if this process did, its streams would wait for it. Of another URL,
        return the file."""
        if url[:5].lower() == "data:":
            # Only a short head: to look through megabytes would hold the interpreter's lock for seconds.
            if (found := _DATA_URL.match(url, 0, MAX_HEAD_CHARS)) is None:
                raise Refused("must be a data URL of the form data:image/TYPE;base64,...")
            check_base64(len(url) - found.end(), self._options.max_image_bytes)
            return url.encode()
        if self._fetcher is None:
            raise Refused("must be a data: URL, because the server fetches no images (--allowed-media-domains)")
        return self._fetcher.fetch(url)

    def _stored(self, data: bytes) -> StoredItem:
        """Return the stored image of a file or a data URL, after at most one run of the processor for all that ask."""
        content, own = hashlib.sha256(data).digest(), Future[StoredItem]()
        reading = self._reading.setdefault(content, own)  # atomic
        if reading is own:
            try:
                own.set_result(self._store.known(content) or self._prepared(content, data))
            except BaseException as error:
                own.set_exception(error)
            finally:
                del self._reading[content]
        return reading.result()

    def _prepared(self, content: bytes, data: bytes) -> StoredItem:
        path = self._store.new_path()
        helper = self._idle.get()
        try:
            return self._store.add(helper.prepare(data, path), content)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise
        finally:
            self._idle.put(helper)
