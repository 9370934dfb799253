"""Prompt lookup: what followed the same last tokens earlier in the request (Saxena, 2023)."""

from collections.abc import Callable, Mapping
from functools import partial

from quire.kernels.cpu.native import Native
from quire.kernels.cpu.prompt_lookup import NativePromptLookup, prompt_lookup_reference
from quire.worker_proc.batch.input_batch import InputBatch


class NgramProposer:
    """Drafts from a request's own prompt and answer alone; keeps nothing.

    Looks for the longest run of ``prompt_lookup_max`` to ``prompt_lookup_min`` last tokens that stood there before;
    of several places it takes the newest. Where that is so near to the end that the text ends before there are
    enough drafts, they go on by repeating: a loop is drafted to its full length.
    """

    def __init__(
        self, batch: InputBatch, lookup_min: int, lookup_max: int, most_drafts: int, native: Native | None
    ) -> None:
        """``most_drafts``: of one row in one step. ``native``: None: NumPy does it."""
        tokens = batch.tokens
        self._range = lookup_min, lookup_max
        self._look_up: Callable[..., list[list[int]]]
        if native is None:
            self._look_up = partial(prompt_lookup_reference, tokens.data, tokens.length)
        else:
            self._look_up = NativePromptLookup(native, tokens.data, tokens.length, most_drafts).look_up

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        drafts = self._look_up(list(wanted), *self._range, max(wanted.values()))
        return {row: own[:most] for (row, most), own in zip(wanted.items(), drafts, strict=True) if own}
