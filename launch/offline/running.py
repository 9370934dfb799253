"""One answer of the offline API that is generated while its caller does other things."""

from quire.frontend.engine.streams import Stream
from quire.frontend.text.prompts import Prompt
from quire.launch.offline.reading import ReadAnswer, Reading
from quire.launch.offline.request_output import CompletionOutput
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import SamplingParams, check_int


class RunningRequest:
    """One answer that is being generated; made by ``LLM.start`` and ``LLM.fork``. It runs whether it is read or not.

    Attributes:
        request_id: id of the request in the engine.
        prompt: its prompt.
        params: its sampling parameters.
        output: the answer as far as it has been read.
    """

    def __init__(
        self,
        reading: Reading,
        stream: Stream,
        prompt: Prompt,
        params: SamplingParams,
        owner: object,
        parent: "RunningRequest | None" = None,
    ) -> None:
        """
        Args:
            owner: the engine ends when nothing refers to it.
            parent: the request whose first tokens it begins with, which are read at once.
        """
        self.request_id = stream.request_id
        self.prompt = prompt
        self.params = params
        self.stream = stream
        self.engine = reading.engine
        self._owner = owner
        self._answer = ReadAnswer(reading, stream, prompt, params, 0)
        self.output = self._answer.output
        if parent is not None:
            self._take()
            self._copy_logprobs(parent.output)

    @property
    def finished(self) -> bool:
        """Whether the answer has been read to its end."""
        return self.output.finish_reason is not None

    def read(self, num_tokens: int | None = None) -> CompletionOutput:
        """Wait until the answer has this many tokens, or has ended, and return it.

        Args:
            num_tokens: number of output tokens from the start of the answer. None: wait for the end.

        Raises:
            InvalidRequest: the scheduler refused the request.
            EngineError: the engine has failed.
        """
        output = self.output
        while not self.finished and (num_tokens is None or len(output.token_ids) < num_tokens):
            with self.engine.turn():
                if not self._take():
                    self.engine.wait()
        return output

    def abort(self) -> None:
        """End the request now, with the finish reason abort. No effect if it has been read to its end."""
        if not self.finished:
            with self.engine.turn():
                self.stream.abort()
            self.output.finish_reason = "abort"

    def _take(self) -> bool:
        """Add what has arrived to the output; return whether there was anything."""
        update = self.stream.take()
        if update is not None:
            self._answer.add(update)
        return update is not None

    def _copy_logprobs(self, parent: CompletionOutput) -> None:
        """Copy the log probabilities of the tokens that the answer begins with."""
        tokens, known = self.output.token_ids, parent.logprobs
        if self.params.logprobs is None or known is None or len(known) < len(parent.token_ids):
            return  # not wanted, or the parent does not have those of all its tokens
        self.output.logprobs = known[: len(tokens)]
        values = (entry[token].logprob for entry, token in zip(self.output.logprobs, tokens, strict=True))
        self.output.cumulative_logprob = sum(values)


def num_shared(parent: RunningRequest, num_tokens: int | None, params: SamplingParams) -> int:
    """Return the number of output tokens that a fork begins with. ``num_tokens``: the wanted number, or None for all.

    Raises:
        InvalidRequest: the parent has ended, has fewer tokens, or has more than the fork may have.
    """
    num_read = len(parent.output.token_ids)
    if parent.finished:
        text = f"request {parent.request_id} has ended ({parent.output.finish_reason}): fork it while it is running"
        raise InvalidRequest(text, "request", "request_ended")
    shared = num_read if num_tokens is None else check_int("num_tokens", num_tokens, 0, num_read)
    if params.max_tokens is not None and params.max_tokens <= shared:
        text = f"max_tokens must be at least {shared + 1}: the fork begins with {shared} output tokens"
        raise InvalidRequest(f"{text} (got {params.max_tokens})", "max_tokens")
    return shared


def check_startable(params: SamplingParams) -> None:
    """Raise InvalidRequest for parameters that only ``generate`` has."""
    if params.n != 1 or params.use_beam_search or params.prompt_logprobs is not None:
        name = "n" if params.n != 1 else "use_beam_search" if params.use_beam_search else "prompt_logprobs"
        raise InvalidRequest(f"{name} cannot be used with a request that is started or forked: use generate", name)
