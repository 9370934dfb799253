"""The seam between requests with a grammar and the library that knows what it allows."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs

Masks = npt.NDArray[np.int32]
"""int32 ``[num_rows, ceil(vocab_size / 32)]``, as in ``SampleInputs``: a set bit allows its token."""


class GrammarTooSlow(GrammarRefused):
    """It was given ``seconds`` to compile, and did not."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"structured_outputs took longer than {seconds:g} s to compile")


class GrammarBusy(GrammarRefused):
    """It may be a good one: there is no room to find out now, and the client may ask again."""

    def __init__(self) -> None:
        super().__init__("too many structured_outputs wait to be compiled")


class Matcher(Protocol):
    """Where one answer stands in its grammar. Used by one thread at a time."""

    def accept(self, token: int) -> bool:
        """Go on by ``token``; False, and nothing changed, where the grammar does not allow it here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` that were accepted."""
        ...

    @property
    def is_done(self) -> bool:
        """Nothing but the end of the text may follow."""
        ...


class CompiledGrammar(Protocol):
    """A grammar, ready for any number of answers."""

    def matcher(self) -> Matcher:
        """At the start of an answer. Cheap: called between two steps."""
        ...


class GrammarBackend(Protocol):
    """One library. ``compile`` runs beside the loop, in any thread; the rest in the loop's."""

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Ready, and known to allow some text.

        Raises:
            GrammarRefused: it is not valid, allows no text, or is too complex to be matched in time.
        """
        ...

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: Masks) -> None:
        """Write what may come next: row ``index`` of ``masks`` for each (matcher of this backend, index).

        All zeros where nothing may: the answer is at a dead end. Ends of text are allowed where the grammar may end.
        """
        ...
