"""Step outputs for the front ends: collects all that a step has for a client into one message."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.protocol.wire.front_end_messages import Ended, EndReason, Hypothesis, Introduced, StepOutputs
from quire.protocol.wire.side_rows import SIDE_KINDS, RowsOf, SideRows
from quire.scheduler_proc.messages.results import Sampled
from quire.scheduler_proc.requests.request import Request

_Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _ClientOutputs:
    """The part of one client in a step."""

    introduced: list[Introduced] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    sampled: tuple[Sampled, _Mask | None] | None = None
    side: list[SideRows] = field(default_factory=list)
    hypotheses: list[tuple[int, list[Hypothesis]]] = field(default_factory=list)


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
        # With two steps in flight, two results may be applied before messages are taken. A message has the tokens of
        # one step only, because a second result of the same handles would replace the first.
        self._seal()

    def sampled(self, sampled: Sampled, cut: dict[int, int], owners: Sequence[Sequence[int | None]]) -> None:
        """Add sampled tokens and the rows beside them.

        Args:
            cut: position in ``sampled.handles`` → how many of its tokens count. Positions that are absent count all.
            owners: for each of ``sampled.side``, the client of each of its parts, or None for a part that is dropped;
                not used for rows of tokens, which go where the tokens go.
        """
        for rows, clients in zip(sampled.side, owners, strict=True):
            self._add_rows(sampled, cut, rows, clients)
        if not len(sampled.handles):
            return
        keep = _kept(sampled, cut) if cut else None
        if self._only_client is not None:
            if keep is None or keep.any():
                self._client(self._only_client).sampled = (sampled, keep)
            return
        of_tokens = self._owners[sampled.handles]
        if sampled.counts is not None:
            of_tokens = np.repeat(of_tokens, sampled.counts)
        for client in np.unique(of_tokens if keep is None else of_tokens[keep]).tolist():
            selected = of_tokens == client
            self._client(client).sampled = (sampled, selected if keep is None else selected & keep)

    def _add_rows(self, sampled: Sampled, cut: dict[int, int], rows: SideRows, owners: Sequence[int | None]) -> None:
        """Add the rows of one kind; those of tokens are cut with them."""
        counts = [count for _, _, count, _ in rows.spans]
        if SIDE_KINDS[rows.kind].rows is RowsOf.TOKENS:
            if not cut and self._only_client is not None:
                self._client(self._only_client).side.append(rows)
                return
            owners = self._owners[rows.handles].tolist()
            kept = {int(sampled.handles[position]): count for position, count in cut.items()}
            counts = [kept.get(handle, count) for handle, count in zip(rows.handles, counts, strict=True)]
        for client in dict.fromkeys(owners):
            if client is not None:
                own = rows.first_rows([n if o == client else 0 for n, o in zip(counts, owners, strict=True)])
                if own is not None:
                    self._client(client).side.append(own)

    def hypotheses(self, request: Request, found: list[Hypothesis]) -> None:
        """Add the outputs of a search."""
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


def _kept(sampled: Sampled, cut: dict[int, int]) -> _Mask:
    """Return a mask of the tokens that count."""
    keep = np.ones(len(sampled.tokens), np.bool_)
    ends = np.arange(1, len(sampled.handles) + 1) if sampled.counts is None else np.cumsum(sampled.counts)
    for position, count in cut.items():
        end = int(ends[position])
        keep[end - sampled.count(position) + count : end] = False
    return keep


def _message(parts: _ClientOutputs) -> StepOutputs:
    introduced, ended, side, found = parts.introduced, parts.ended, parts.side, parts.hypotheses
    if parts.sampled is None:
        return StepOutputs(introduced, None, None, ended, None, side, found)
    sampled, keep = parts.sampled
    handles, tokens, counts = sampled.handles, sampled.tokens, sampled.counts
    if keep is not None and counts is None:
        handles, tokens = handles[keep], tokens[keep]
    elif keep is not None and counts is not None:
        tokens = tokens[keep]
        counts = np.add.reduceat(keep, np.cumsum(counts) - counts).astype(np.int32)
        handles, counts = handles[counts > 0], counts[counts > 0]
    if counts is not None and (counts == 1).all():
        counts = None
    return StepOutputs(introduced, handles, tokens, ended, counts, side, found)
