"""What one step brings each front end, handed over as one message per client."""

import msgspec
import numpy as np
import numpy.typing as npt

from quire.protocol.wire.logprobs import Logprobs, PromptLogprobs
from quire.protocol.wire.messages import Ended, EndReason, Int32, Introduced, ModelRunnerOutput, StepOutputs
from quire.scheduler_proc.core.in_flight import Sampled
from quire.scheduler_proc.requests.request import Request

_Mask = npt.NDArray[np.bool_]


class _ClientOutputs:
    """One client's part of a step."""

    __slots__ = ("ended", "introduced", "prompts", "sampled")

    def __init__(self) -> None:
        self.introduced: list[Introduced] = []
        self.ended: list[Ended] = []
        self.sampled: tuple[Sampled, _Mask | None, ModelRunnerOutput] | None = None
        self.prompts: tuple[list[int], ModelRunnerOutput] | None = None


class OutputCollector:
    """Collects between two calls of ``take``; of a request it keeps only whose it is, by handle."""

    def __init__(self) -> None:
        self._clients: dict[int, _ClientOutputs] = {}
        self._sealed: list[tuple[int, StepOutputs]] = []
        self._owners = np.zeros(64, np.int32)
        """Client by handle."""
        self._only_client: int | None = None
        """The one client that ever had a request; None when there were several, or none."""
        self._seen: set[int] = set()

    def own(self, handle: int, client: int) -> None:
        """``handle`` belongs to ``client`` from now on."""
        if handle >= len(self._owners):
            self._owners = np.concatenate([self._owners, np.zeros(max(handle, len(self._owners)), np.int32)])
        self._owners[handle] = client
        self._seen.add(client)
        self._only_client = client if len(self._seen) == 1 else None

    def begin_result(self) -> None:
        """What comes now belongs to another step than what came before."""
        self._seal()

    def sampled(self, sampled: Sampled, cut: dict[int, int], result: ModelRunnerOutput) -> None:
        """Tokens for the clients. ``cut``: position in ``sampled.handles`` → how many of its tokens count at most.

        ``result``: where their log probabilities are.
        """
        if not len(sampled.handles):
            return
        keep = _kept(sampled, cut) if cut else None
        if self._only_client is not None:
            if keep is None or keep.any():
                self._client(self._only_client).sampled = (sampled, keep, result)
            return
        owners = self._owners[sampled.handles]
        if sampled.counts is not None:
            owners = np.repeat(owners, sampled.counts)
        for client in np.unique(owners if keep is None else owners[keep]).tolist():
            mine = owners == client
            self._client(client).sampled = (sampled, mine if keep is None else mine & keep, result)

    def prompts(self, owners: dict[int, int], result: ModelRunnerOutput) -> None:
        """Log probabilities of prompts: entry of ``result.prompt_logprobs`` → whose it is; others are nobody's."""
        for client in dict.fromkeys(owners.values()):
            mine = [index for index, owner in owners.items() if owner == client]
            self._client(client).prompts = (mine, result)

    def introduce(self, request: Request) -> None:
        """Its first message names it; later ones use the handle."""
        if not request.introduced:
            request.introduced = True
            told = Introduced(request.handle, request.request_id, max(request.num_cached_tokens, 0))
            self._client(request.client).introduced.append(told)

    def ended(
        self, request: Request, reason: EndReason, num_output_tokens: int, stop_reason: int | None, detail: str
    ) -> Ended:
        self.introduce(request)
        ending = Ended(request.handle, int(reason), num_output_tokens, stop_reason, detail)
        self._client(request.client).ended.append(ending)
        return ending

    def take(self) -> list[tuple[int, StepOutputs]]:
        """(client, message) for each client that anything happened for, in order; one per step where several came."""
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
    """Which of the tokens count."""
    keep = np.ones(len(sampled.tokens), np.bool_)
    ends = np.arange(1, len(sampled.handles) + 1) if sampled.counts is None else np.cumsum(sampled.counts)
    for position, count in cut.items():
        end = int(ends[position])
        keep[end - sampled.count(position) + count : end] = False
    return keep


def _message(parts: _ClientOutputs) -> StepOutputs:
    message = _with_tokens(parts)
    return message if parts.prompts is None else _with_prompt_logprobs(message, *parts.prompts)


def _with_tokens(parts: _ClientOutputs) -> StepOutputs:
    if parts.sampled is None:
        return StepOutputs(parts.introduced, None, None, parts.ended)
    sampled, keep, result = parts.sampled
    handles, tokens, counts = sampled.handles, sampled.tokens, sampled.counts
    if keep is not None and counts is None:
        handles, tokens = handles[keep], tokens[keep]
    elif keep is not None and counts is not None:
        tokens = tokens[keep]
        counts = np.add.reduceat(keep, np.cumsum(counts) - counts).astype(np.int32)
        handles, counts = handles[counts > 0], counts[counts > 0]
    if counts is not None and (counts == 1).all():
        counts = None
    message = StepOutputs(parts.introduced, handles, tokens, parts.ended, counts)
    return message if result.logprobs is None else _with_logprobs(message, result, keep)


def _with_logprobs(message: StepOutputs, result: ModelRunnerOutput, kept: _Mask | None) -> StepOutputs:
    """``message`` with those log probabilities of ``result`` that belong to its tokens."""
    assert result.logprobs is not None and result.logprob_ranks is not None
    assert result.logprob_token_ids is not None and result.logprob_values is not None
    rows: Int32 = np.array(result.logprobs.rows, np.int32)
    picked = np.arange(len(rows))
    if kept is not None:
        place = np.cumsum(kept) - 1
        picked = np.flatnonzero(kept[rows])
        rows = place[rows[picked]].astype(np.int32)
    if not len(rows):
        return message
    order = np.argsort(rows, kind="stable")
    rows, picked = rows[order], picked[order]
    width = result.logprobs.width
    return msgspec.structs.replace(
        message,
        logprobs=Logprobs(rows.tolist(), width),
        logprob_token_ids=result.logprob_token_ids.reshape(-1, width)[picked].ravel(),
        logprob_values=result.logprob_values.reshape(-1, width)[picked].ravel(),
        logprob_ranks=result.logprob_ranks[picked],
    )


def _with_prompt_logprobs(message: StepOutputs, entries: list[int], result: ModelRunnerOutput) -> StepOutputs:
    """``message`` with these entries of the prompts' log probabilities in ``result``."""
    told = result.prompt_logprobs
    assert told is not None and result.prompt_logprob_ranks is not None
    assert result.prompt_logprob_token_ids is not None and result.prompt_logprob_values is not None
    mine = np.repeat(np.isin(np.arange(len(told.handles)), entries), told.counts)
    return msgspec.structs.replace(
        message,
        prompt_logprobs=PromptLogprobs(
            [told.handles[i] for i in entries],
            [told.starts[i] for i in entries],
            [told.counts[i] for i in entries],
            told.width,
        ),
        prompt_logprob_token_ids=result.prompt_logprob_token_ids.reshape(-1, told.width)[mine].ravel(),
        prompt_logprob_values=result.prompt_logprob_values.reshape(-1, told.width)[mine].ravel(),
        prompt_logprob_ranks=result.prompt_logprob_ranks[mine],
    )
