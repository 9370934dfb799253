"""Step outputs for the front ends: collects all that a step has for a client into one message."""

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.front_end_messages import Ended, EndReason, Hypothesis, Introduced, StepOutputs
from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs
from quire.protocol.wire.side_arrays import PooledRows, RoutedExperts
from quire.scheduler_proc.core.in_flight import Sampled
from quire.scheduler_proc.requests.request import Request

_Mask = npt.NDArray[np.bool_]


class _ClientOutputs:
    """The part of one client in a step."""

    __slots__ = ("ended", "experts", "hypotheses", "introduced", "pooled", "prompts", "sampled")

    def __init__(self) -> None:
        self.introduced: list[Introduced] = []
        self.ended: list[Ended] = []
        self.sampled: tuple[Sampled, _Mask | None, Logprobs | None] | None = None
        self.prompts: PromptLogprobs | None = None
        self.hypotheses: list[tuple[int, list[Hypothesis]]] = []
        self.pooled: PooledRows | None = None
        self.experts: RoutedExperts | None = None


class OutputCollector:
    """Collects outputs between two calls of ``take``. Its only state per request is the client, by handle."""

    def __init__(self) -> None:
        self._clients: dict[int, _ClientOutputs] = {}
        self._sealed: list[tuple[int, StepOutputs]] = []
        self._owners = np.zeros(64, np.int32)
        """Client by handle."""
        self._only_client: int | None = None
        """The only client that has sent requests, or None if there are several or none."""
        self._seen: set[int] = set()

    def set_owner(self, handle: int, client: int) -> None:
        """Send all following outputs of ``handle`` to ``client``."""
        if handle >= len(self._owners):
            self._owners = np.concatenate([self._owners, np.zeros(max(handle, len(self._owners)), np.int32)])
        self._owners[handle] = client
        self._seen.add(client)
        self._only_client = client if len(self._seen) == 1 else None

    def begin_result(self) -> None:
        """Start the outputs of another step."""
        self._seal()

    def sampled(self, sampled: Sampled, cut: dict[int, int], logprobs: Logprobs | None) -> None:
        """Add sampled tokens and their logprobs.

        ``cut``: position in ``sampled.handles`` → how many of its tokens count. Positions that are absent count all.
        """
        if not len(sampled.handles):
            return
        keep = _kept(sampled, cut) if cut else None
        if self._only_client is not None:
            if keep is None or keep.any():
                self._client(self._only_client).sampled = (sampled, keep, logprobs)
            return
        owners = self._owners[sampled.handles]
        if sampled.counts is not None:
            owners = np.repeat(owners, sampled.counts)
        for client in np.unique(owners if keep is None else owners[keep]).tolist():
            selected = owners == client
            self._client(client).sampled = (sampled, selected if keep is None else selected & keep, logprobs)

    def prompts(self, owners: dict[int, int], logprobs: PromptLogprobs) -> None:
        """Add prompt logprobs. ``owners``: index of a part → client; parts without a client are dropped."""
        for client, parts in _by_client(owners):
            self._client(client).prompts = logprobs.take(parts)

    def pooled(self, owners: dict[int, int], rows: PooledRows) -> None:
        """Add vectors and scores. ``owners``: as of ``prompts``."""
        for client, parts in _by_client(owners):
            self._client(client).pooled = rows.take(parts)

    def routed_experts(self, owners: dict[int, int], rows: RoutedExperts) -> None:
        """Add routed experts. ``owners``: as of ``prompts``."""
        for client, parts in _by_client(owners):
            self._client(client).experts = rows.take(parts)

    def hypotheses(self, request: Request, found: list[Hypothesis]) -> None:
        """Add the outputs of a beam search."""
        self.introduce(request)
        self._client(request.client).hypotheses.append((request.handle, found))

    def introduce(self, request: Request) -> None:
        """Send the request id with the first message about a request; later messages use the handle only."""
        if not request.introduced:
            request.introduced = True
            num_cached_tokens = max(request.num_cached_tokens, 0)
            introduced = Introduced(request.handle, request.request_id, num_cached_tokens, request.admitted)
            self._client(request.client).introduced.append(introduced)

    def ended(
        self, request: Request, reason: EndReason, num_output_tokens: int, stop_reason: int | None, detail: str
    ) -> Ended:
        self.introduce(request)
        ending = Ended(request.handle, int(reason), num_output_tokens, stop_reason, detail)
        self._client(request.client).ended.append(ending)
        return ending

    def take(self) -> list[tuple[int, StepOutputs]]:
        """Return and clear the pending (client, message) pairs, in order; one per client and step."""
        self._seal()
        messages, self._sealed = self._sealed, []
        return messages

    def _seal(self) -> None:
        if self._clients:
            self._sealed += [(client, _message(parts)) for client, parts in self._clients.items()]
            self._clients = {}

    def _client(self, client: int) -> _ClientOutputs:
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = _ClientOutputs()
        return found


def _by_client(owners: dict[int, int]) -> list[tuple[int, list[int]]]:
    """Return (client, indices of its parts)."""
    found: dict[int, list[int]] = {}
    for index, client in owners.items():
        found.setdefault(client, []).append(index)
    return list(found.items())


def _kept(sampled: Sampled, cut: dict[int, int]) -> _Mask:
    """Return a mask of the tokens that count."""
    keep = np.ones(len(sampled.tokens), np.bool_)
    ends = np.arange(1, len(sampled.handles) + 1) if sampled.counts is None else np.cumsum(sampled.counts)
    for position, count in cut.items():
        end = int(ends[position])
        keep[end - sampled.count(position) + count : end] = False
    return keep


def _message(parts: _ClientOutputs) -> StepOutputs:
    introduced, ended, prompts, found = parts.introduced, parts.ended, parts.prompts, parts.hypotheses
    pooled, experts = parts.pooled, parts.experts
    if parts.sampled is None:
        return StepOutputs(introduced, None, None, ended, None, None, prompts, found, pooled, experts)
    sampled, keep, logprobs = parts.sampled
    handles, tokens, counts = sampled.handles, sampled.tokens, sampled.counts
    if keep is not None and counts is None:
        handles, tokens = handles[keep], tokens[keep]
    elif keep is not None and counts is not None:
        tokens = tokens[keep]
        counts = np.add.reduceat(keep, np.cumsum(counts) - counts).astype(np.int32)
        handles, counts = handles[counts > 0], counts[counts > 0]
    if counts is not None and (counts == 1).all():
        counts = None
    selected = None if logprobs is None else logprobs.filtered(keep)
    return StepOutputs(introduced, handles, tokens, ended, counts, selected, prompts, found, pooled, experts)
