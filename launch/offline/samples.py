"""The answers to one prompt of a call: ``n`` sequences, of which the later ones may be forks of an earlier one."""

import secrets
from collections.abc import Callable

import msgspec

from quire.frontend.engine.answers import BeamOutput
from quire.frontend.engine.streams import Stream
from quire.frontend.engine.terms import Terms
from quire.frontend.engine.update import Update
from quire.frontend.text.logprob import logprob_by_id
from quire.frontend.text.prompts import Prompt, fit_params
from quire.launch.offline.batch import BatchPart
from quire.launch.offline.reading import ReadAnswer, Reading
from quire.launch.offline.request_output import CompletionOutput, RequestOutput
from quire.protocol.request.sampling_params import SamplingParams, seed_for_sample


class PromptSamples:
    """Owns the output of one prompt, and what its sequences have in common."""

    def __init__(
        self,
        reading: Reading,
        name: str,
        terms: Terms,
        prompt: Prompt,
        params: SamplingParams,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            name: begins the ids of the sequences.
            on_text: called with each new text of the first answer.
        """
        self.reading, self.name, self.terms, self.prompt, self.params = reading, name, terms, prompt, params
        self.fitted = fit_params(params, prompt, reading.engine, clamp=True)
        self.on_text = on_text
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.root: Stream | None = None
        """The sequence in flight that further ones are forked from."""
        self.num_to_submit = self.num_left = params.n
        answers = [CompletionOutput(index) for index in range(params.n)]
        self.output = RequestOutput(name, prompt.text, prompt.token_ids.tolist(), answers)
        self.samples = [Sample(self, index) for index in range(params.n)]


class Sample(BatchPart):
    """One sequence of a prompt."""

    def __init__(self, of: PromptSamples, index: int) -> None:
        self.terms = of.terms
        self._of = of
        self._index = index
        self._answer: ReadAnswer | None = None

    def submit(self, on_update: Callable[[], None]) -> Stream:
        of = self._of
        of.num_to_submit -= 1
        params, fitted = of.params, of.fitted
        if self._index and params.prompt_logprobs is not None:
            # Only a prompt's first answer computes these, so that the other answers can hit the prefix cache.
            params, fitted = (msgspec.structs.replace(each, prompt_logprobs=None) for each in (params, fitted))
        name, seed = f"{of.name}-{self._index}", seed_for_sample(of.seed, self._index)
        request = self.terms.request(name, of.prompt, fitted, seed, is_last=not of.num_to_submit)
        stream = of.reading.engine.submit(request, on_update, of.root)
        if of.root is None or of.root.over:
            of.root = stream
        self._answer = ReadAnswer(of.reading, stream, of.prompt, params, self._index)
        of.output.outputs[self._index] = self._answer.output
        return stream

    def put_back(self) -> None:
        self._of.num_to_submit += 1

    def take(self, update: Update) -> bool:
        assert self._answer is not None
        of, output = self._of, self._of.output
        delta = self._answer.add(update)
        if of.on_text is not None and delta.text and not self._index:
            of.on_text(delta.text)
        if delta.prompt_logprobs is not None:
            entries = delta.prompt_logprobs.entries(of.params.prompt_logprobs or 0)
            output.prompt_logprobs = [None, *(logprob_by_id(entry, of.reading.token_texts) for entry in entries)]
        if delta.beams is not None:
            output.outputs = [_of_beam(index, beam) for index, beam in enumerate(delta.beams)]
        if delta.finish_reason is None:
            return False
        if not self._index:  # the others may be forks of it, which compute no prompt
            output.num_cached_tokens = delta.num_cached_tokens
        of.num_left -= 1
        output.finished = not of.num_left
        return True

    @property
    def ends_prompt(self) -> bool:
        return not self._of.num_left


def _of_beam(index: int, beam: BeamOutput) -> CompletionOutput:
    ended = beam.finish_reason, beam.stop_reason
    return CompletionOutput(index, beam.text, beam.token_ids, beam.logprob, None, *ended, score=beam.score)
