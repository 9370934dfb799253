"""``quire replay --against URL``: send a workload to a running server and ask for answers of the recorded lengths.

The calls come from the same sources as in a simulation, on the real clock. The record holds only what the client sees:
the server's steps and queues are unknown.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.bench.measure.http_client import RequestSettings, ServerClient, Timing, Transport
from quire.protocol.errors import ConfigError
from quire.replay.live_prompts import PromptMaker
from quire.replay.run.run_record import RequestRun, RunRecord
from quire.replay.workload.sources import NEVER, Source, source_of
from quire.replay.workload.workload import Call, Workload

DEFAULT_VOCABULARY = 1024
"""Vocabulary size assumed of an unknown server: real models have more. Some test models have fewer."""
SMALL_VOCABULARY = 256
MAX_MESSAGE = 200
LATE_MS = 50.0
TOO_LONG = "http 400 context_length_exceeded"

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class LiveTarget:
    """The server to send requests to, as the user describes it.

    Attributes:
        max_prompt_tokens: longer prompts are over-long, like prompts that do not fit the server's context.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    vocab_size: int | None = None
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """What the server supports, as found by probing it.

    Attributes:
        context: maximum number of prompt and output tokens together; None if the server does not report it.
        token_ids: prompts may be token ids.
        forces_length: the server accepts the fields that force the length of an answer.
        priorities: the server accepts a request's priority.
    """

    model: str
    context: int | None
    vocab_size: int
    token_ids: bool = True
    forces_length: bool = True
    priorities: bool = False

    def settings(self, num_output_tokens: int, priority: int = 0) -> RequestSettings:
        extra: dict[str, Any] = {"min_tokens": num_output_tokens} if self.forces_length else {}
        if self.priorities:
            extra["priority"] = priority
        return RequestSettings(self.model, num_output_tokens, 0.0, 0, False, self.forces_length, extra)


def run_live(
    workload: Workload,
    target: LiveTarget,
    *,
    concurrency: int | None = None,
    closed_loop: bool = False,
    overlong: str = "refuse",
    progress: Progress | None = None,
    transport: Transport | None = None,
) -> RunRecord:
    """Send every call and record its answer. After Ctrl-C, ``record.extra["interrupted"]`` is set.

    Args:
        overlong: refuse, clip or drop.
        progress: called with the time in seconds and the number of finished calls.
        transport: replaces sockets in tests.

    Raises:
        ConfigError: no server answers at the URL, or it cannot complete text.
    """
    source = source_of(workload.calls, concurrency, closed_loop)
    return asyncio.run(_run(workload, target, source, overlong, progress, transport))


async def _run(
    workload: Workload,
    target: LiveTarget,
    source: Source,
    overlong: str,
    progress: Progress | None,
    transport: Transport | None,
) -> RunRecord:
    async with ServerClient(target.url, target.api_key, transport) as client:
        server = await _probe(client, target, any(call.priority for call in workload.calls))
        before = await client.metrics()
        load = _Load(client, server, source, overlong, target.max_prompt_tokens, progress)
        interrupted = await load.run()
        after = {} if interrupted else await client.metrics()
    record = load.record
    record.source = workload.source
    record.title = f"{workload.format} trace against {server.model}"
    record.notes[:0] = workload.notes
    if interrupted:
        record.extra["interrupted"] = True
        record.notes.append(f"interrupted: {len(record.requests)} of {len(workload.calls)} requests had been sent")
    preemptions = "num_preemptions_total"
    if preemptions in before and preemptions in after:
        record.extra["server_preemptions"] = count = int(after[preemptions] - before[preemptions])
        record.notes += [f"the server preempted {count} requests during the run, of all clients"] if count else []
    return record


# ---- what the server supports


async def _probe(client: ServerClient, target: LiveTarget, priorities: bool) -> ProbedServer:
    """Request one token with fewer and fewer fields until the server answers.

    Other servers reject requests with fields that they do not know.

    Raises:
        ConfigError: the server rejects the simplest request too, or fails.
    """
    model, context = await client.find_card(target.model)
    sizes = [target.vocab_size] if target.vocab_size is not None else [DEFAULT_VOCABULARY, SMALL_VOCABULARY]
    tries = [
        ProbedServer(model, context, size, token_ids, forces_length, with_priority)
        for token_ids in (True, False)
        for size in (sizes if token_ids else sizes[:1])
        for forces_length in (True, False)
        for with_priority in ((True, False) if priorities and forces_length else (False,))
    ]
    for server in tries:
        prompt = [server.vocab_size - 1] if server.token_ids else "a"
        timing = await client.stream(server.settings(1), prompt, time.perf_counter)
        if timing.error is None:
            return server
        kind, message = timing.error
        if not kind.startswith(("http 400", "http 422")):
            raise ConfigError(f"the server cannot complete a prompt: {kind}: {message[:MAX_MESSAGE]}".rstrip(": "))
    raise ConfigError(f"the server rejects every prompt: {message[:MAX_MESSAGE]}")


# ---- load


class _Load:
    """One run of calls against a server. Owns the record and the requests in flight."""

    def __init__(
        self,
        client: ServerClient,
        server: ProbedServer,
        source: Source,
        overlong: str,
        max_prompt_tokens: int | None,
        progress: Progress | None,
    ) -> None:
        self.record = RunRecord(cost="a real server, measured by its client")
        self._client, self._server, self._source = client, server, source
        self._overlong = overlong
        self._max_prompt_tokens = max_prompt_tokens
        self._progress = progress
        self._prompts = PromptMaker(server.vocab_size, token_ids=server.token_ids)
        self._ended: list[Call] = []
        self._wake = asyncio.Event()
        self._gaps: Counter[float] = Counter()
        self._counts: Counter[str] = Counter()
        self._late_s = 0.0
        self._start = 0.0
        self._first_message: dict[str, str] = {}

    async def run(self) -> bool:
        """Run until every call has finished; return whether the run was cancelled before that."""
        self._start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                await self._drive(group)
        except asyncio.CancelledError:
            interrupted = True
        else:
            interrupted = False
        self._finish()
        return interrupted

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _drive(self, group: asyncio.TaskGroup) -> None:
        source = self._source
        num_running = 0
        while True:
            self._wake.clear()
            ended, self._ended = self._ended, []
            for call in ended:
                source.ended(call, self._now())
            num_running -= len(ended)
            due = source.next_time()
            for call in source.take(self._now()):
                self._late_s = max(self._late_s, self._now() - due)
                group.create_task(self._send(call))
                num_running += 1
            due = source.next_time()
            if due == NEVER and not num_running:
                return
            try:
                async with asyncio.timeout(None if due == NEVER else max(0.0, due - self._now())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _send(self, call: Call) -> None:
        """Send one call and record how it ends."""
        num_tokens, refusal = self._fit(call)
        run = RequestRun(call.request_id, self._now(), call.num_prompt_tokens, call.conversation, call.priority)
        try:
            if refusal and self._overlong == "drop":
                self._counts["dropped"] += 1
                return
            self.record.requests.append(run)
            if refusal:
                run.finish, run.finish_detail, run.end = "rejected", refusal, run.arrival
                return
            self._counts["clipped"] += num_tokens < call.num_prompt_tokens
            settings = self._server.settings(call.num_output_tokens, call.priority)
            timing = await self._client.stream(settings, self._prompts.make(call, num_tokens), self._now)
            self._take(run, timing, call)
        except asyncio.CancelledError:
            run.finish, run.finish_detail, run.end = "abort", "interrupted", self._now()
            raise
        finally:
            self._ended.append(call)
            self._wake.set()
            self._counts["ended"] += 1
            if self._progress is not None:
                self._progress(self._now(), self._counts["ended"])

    def _fit(self, call: Call) -> tuple[int, str]:
        """Return the number of prompt tokens to send, and the reason if the prompt is too long to send, or pooled."""
        if call.pooling is not None:
            return 0, "a pooled request, which a live run does not send"
        limits = []
        if self._server.context is not None:
            limits.append((self._server.context - call.num_output_tokens, "the server's context"))
        if self._max_prompt_tokens is not None:
            limits.append((self._max_prompt_tokens, "--max-prompt-tokens"))
        room, what = min(limits, default=(call.num_prompt_tokens, ""))
        if call.num_prompt_tokens <= room:
            return call.num_prompt_tokens, ""
        if self._overlong == "clip" and room >= 1:
            return room, ""
        return 0, f"prompt of {call.num_prompt_tokens} tokens and its answer exceed {what}"

    def _take(self, run: RequestRun, timing: Timing, call: Call) -> None:
        """Record the outcome of a call. ``timing`` is on the run's clock."""
        # Some servers send the finish reason in a separate chunk after the last token's.
        times = timing.chunks[: timing.output_tokens] or timing.chunks
        run.arrival, run.end = timing.sent, times[-1] if times else timing.ended
        if times:
            run.first_token = times[0]
        run.num_prompt_tokens = timing.prompt_tokens or run.num_prompt_tokens
        run.num_cached_tokens = timing.cached_tokens
        run.num_output_tokens = timing.output_tokens
        if timing.error is not None:
            kind, message = timing.error
            if kind == TOO_LONG:  # counted by the server's own tokenizer
                run.finish, run.finish_detail, run.end = "rejected", message[:MAX_MESSAGE], run.arrival
                return
            run.finish, run.finish_detail = "error", f"{kind}: {message[:MAX_MESSAGE]}".rstrip(": ")
            self._counts[f"error {kind}"] += 1
            self._first_message.setdefault(kind, message[:MAX_MESSAGE])
            return
        run.finish = timing.finish_reason
        self._counts["other length"] += timing.output_tokens != call.num_output_tokens
        for earlier, later in pairwise(times):
            self._gaps[round((later - earlier) * 1e3, 3)] += 1

    # ---- results

    def _finish(self) -> None:
        record, server = self.record, self._server
        record.requests.sort(key=lambda run: run.arrival)
        first = min((run.arrival for run in record.requests), default=0.0)
        record.virtual_s = max((run.end for run in record.requests), default=first) - first
        record.wall_s = self._now()
        record.itl = sorted(self._gaps.items())
        record.settings = {"max_model_len": server.context, "forced_lengths": server.forces_length}
        errors = {key.removeprefix("error "): n for key, n in sorted(self._counts.items()) if key.startswith("error ")}
        record.extra |= {"errors": errors, "client_late_ms": self._late_s * 1e3}
        record.notes += [f"error: {n} x {kind}: {self._first_message[kind]}".rstrip(": ") for kind, n in errors.items()]
        record.notes += self._notes()

    def _notes(self) -> list[str]:
        server, counts = self._server, self._counts
        folded = self._prompts.num_folded
        possible = (
            (not server.token_ids, "the server accepts no token ids: generated prompts are one-letter words"),
            (not server.forces_length, "the server does not support forced output lengths"),
            (counts["other length"], f"{counts['other length']} answers differ in length from the trace"),
            (counts["clipped"], f"{counts['clipped']} over-long prompts were clipped"),
            (counts["dropped"], f"{counts['dropped']} over-long prompts were dropped"),
            (folded, f"{folded} prompts have token ids beyond the server's vocabulary: ids were taken modulo its size"),
            (self._late_s * 1e3 > LATE_MS, f"this client sent requests up to {self._late_s * 1e3:.0f} ms late"),
        )
        notes = [text for holds, text in possible if holds]
        notes.append("answers are the server's own: later turns cannot find recorded answers in its prefix cache")
        return notes
