"""The n-gram proposer (prompt lookup; Saxena, 2023): drafts the tokens after an earlier match of the last tokens."""

from collections.abc import Callable, Mapping
from functools import partial

from quire.kernels.cpu.native.library import Native
from quire.kernels.cpu.sampling.prompt_lookup import NativePromptLookup, prompt_lookup_reference
from quire.worker_proc.batch.input_batch import InputBatch


class NgramProposer:
    """Drafts from a request's own prompt and output; stateless.

    Searches for the last ``lookup_max`` tokens earlier in the sequence, then for fewer, down to ``lookup_min``. Of
    several matches it takes the latest. If the sequence ends before there are enough drafts, the tokens after the match
    repeat: a loop in the text is drafted to the full number of drafts.
    """

    def __init__(
        self, batch: InputBatch, lookup_min: int, lookup_max: int, max_drafts: int, native: Native | None
    ) -> None:
        """``max_drafts``: maximum drafts per row and step. ``native``: None to search with NumPy."""
        tokens = batch.tokens
        self._range = lookup_min, lookup_max
        self._look_up: Callable[..., list[list[int]]]
        if native is None:
            self._look_up = partial(prompt_lookup_reference, tokens.data, tokens.length)
        else:
            self._look_up = NativePromptLookup(native, tokens.data, tokens.length, max_drafts).look_up

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        drafts = self._look_up(list(wanted), *self._range, max(wanted.values()))
        return {row: own[:limit] for (row, limit), own in zip(wanted.items(), drafts, strict=True) if own}
