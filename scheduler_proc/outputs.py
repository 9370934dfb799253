"""What one step brings each front end, gathered request by request and handed over as one message per client."""

import numpy as np

from quire.protocol.messages import Ended, EndReason, Introduced, Logprobs, ModelRunnerOutput, StepOutputs
from quire.scheduler_proc.request import Request


class _ClientOutputs:
    """One client's share. ``sources`` are positions of its tokens in the worker's result."""

    def __init__(self) -> None:
        self.introduced: list[Introduced] = []
        self.handles: list[int] = []
        self.tokens: list[int] = []
        self.sources: list[int] = []
        self.ended: list[Ended] = []


class OutputCollector:
    """Collects between two calls of ``take``; holds nothing of a request after that."""

    def __init__(self) -> None:
        self._clients: dict[int, _ClientOutputs] = {}
        self._sealed: list[tuple[int, StepOutputs]] = []
        self._result: ModelRunnerOutput | None = None

    def begin_result(self, result: ModelRunnerOutput | None) -> None:
        """Tokens added from now on come from ``result``; those of an earlier one keep a message of their own."""
        self._seal()
        self._result = result

    def token(self, request: Request, token: int, source: int) -> None:
        client = self._client_of(request)
        client.handles.append(request.handle)
        client.tokens.append(token)
        client.sources.append(source)

    def ended(
        self, request: Request, reason: EndReason, num_output_tokens: int, stop_reason: int | None, detail: str
    ) -> None:
        ending = Ended(request.handle, int(reason), num_output_tokens, stop_reason, detail)
        self._client_of(request).ended.append(ending)

    def take(self) -> list[tuple[int, StepOutputs]]:
        """(client, message) for each client that anything happened for, in order; one per step where several came."""
        self._seal()
        messages, self._sealed = self._sealed, []
        return messages

    def _seal(self) -> None:
        self._sealed += [(index, self._message(client)) for index, client in self._clients.items()]
        self._clients.clear()
        self._result = None

    def _client_of(self, request: Request) -> _ClientOutputs:
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = _ClientOutputs()
        if not request.introduced:
            request.introduced = True
            client.introduced.append(Introduced(request.handle, request.request_id, max(request.num_cached_tokens, 0)))
        return client

    def _message(self, client: _ClientOutputs) -> StepOutputs:
        if not client.handles:
            return StepOutputs(client.introduced, None, None, client.ended)
        message = StepOutputs(
            introduced=client.introduced,
            handles=np.array(client.handles, np.int32),
            tokens=np.array(client.tokens, np.int32),
            ended=client.ended,
        )
        result = self._result
        if result is None or result.logprobs is None:
            return message
        return _with_logprobs(message, result, client.sources)


def fault_of_extras(result: ModelRunnerOutput, handles: list[int], vocab_size: int) -> str | None:
    """Why bad rows or log probabilities of a result cannot belong to its tokens; None when they can."""
    if not set(result.bad) <= set(handles):
        return "bad rows that did not sample"
    told = result.logprobs
    frames = (result.logprob_token_ids, result.logprob_values, result.logprob_ranks)
    if told is None:
        return None
    if told.width < 1 or len(set(told.rows)) != len(told.rows) or not set(told.rows) <= set(range(len(handles))):
        return "log probabilities of rows that did not sample"
    entries = len(told.rows) * told.width
    if [-1 if f is None else len(f) for f in frames] != [entries, entries, len(told.rows)]:
        return "log probabilities do not add up"
    ids = result.logprob_token_ids
    if ids is not None and len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        return "log probability of a token id outside the vocabulary"
    return None


def _with_logprobs(message: StepOutputs, result: ModelRunnerOutput, sources: list[int]) -> StepOutputs:
    """``message`` with those log probabilities of ``result`` that belong to its tokens."""
    assert result.logprobs is not None and result.logprob_ranks is not None
    assert result.logprob_token_ids is not None and result.logprob_values is not None
    place = {row: i for i, row in enumerate(result.logprobs.rows)}
    rows = [i for i, source in enumerate(sources) if source in place]
    if not rows:
        return message
    picked = np.array([place[sources[i]] for i in rows])
    width = result.logprobs.width
    return StepOutputs(
        introduced=message.introduced,
        handles=message.handles,
        tokens=message.tokens,
        ended=message.ended,
        logprobs=Logprobs(rows, width),
        logprob_token_ids=result.logprob_token_ids.reshape(-1, width)[picked].ravel(),
        logprob_values=result.logprob_values.reshape(-1, width)[picked].ravel(),
        logprob_ranks=result.logprob_ranks[picked],
    )
