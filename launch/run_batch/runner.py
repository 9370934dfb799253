"""Runs a batch with a bounded number of requests at the server, and of results in memory; results keep the order."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from quire.launch.run_batch.lines import InvalidLine, RequestLine, ResultLine

WINDOW = 4
"""Lines between the first one without a result and the last one that was sent, as a multiple of the concurrency."""


@dataclass(slots=True)
class Summary:
    """``failed``: lines whose result is an error."""

    lines: int = 0
    failed: int = 0
    output_tokens: int = 0

    def add(self, result: ResultLine) -> None:
        self.lines += 1
        self.failed += result.error is not None
        body = None if result.response is None else result.response.body
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            count = usage.get("completion_tokens", usage.get("output_tokens"))
            self.output_tokens += count if isinstance(count, int) else 0


def run_lines(
    lines: Iterable[RequestLine | InvalidLine],
    send: Callable[[RequestLine], ResultLine],
    write: Callable[[bytes], object],
    concurrency: int,
    shown: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Send every request and write every result. ``shown``: called after each result.

    Raises:
        EngineError: as ``send``; the results of the lines before are written.
    """
    summary = Summary()
    window: deque[Future[ResultLine]] = deque()

    def take() -> None:
        result = window.popleft().result()
        write(msgspec.json.encode(result) + b"\n")
        summary.add(result)
        shown(summary)

    pool = ThreadPoolExecutor(concurrency, "batch")
    try:
        for line in lines:
            if isinstance(line, InvalidLine):
                done: Future[ResultLine] = Future()
                done.set_result(line.result())
                window.append(done)
            else:
                window.append(pool.submit(send, line))
            while window and (len(window) >= WINDOW * concurrency or window[0].done()):
                take()
        while window:
            take()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return summary
