"""The interface of a grammar library."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.request.grammar_checks import GrammarRefused
from quire.protocol.request.structured_outputs import StructuredOutputs

Masks = npt.NDArray[np.int32]
"""int32 ``[num_rows, ceil(vocab_size / 32)]``, as in ``SampleInputs``: a set bit allows its token."""


class GrammarTooSlow(GrammarRefused):
    """The grammar did not compile within ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"structured_outputs took longer than {seconds:g} s to compile")


class GrammarBusy(GrammarRefused):
    """The grammar was not compiled for lack of capacity; the client may retry."""

    def __init__(self) -> None:
        super().__init__("structured_outputs cannot be compiled now, for lack of CPU time or memory: retry later")


class GrammarPosition(Protocol):
    """The position of one output in its grammar. Used by one thread at a time."""

    def accept(self, token: int) -> bool:
        """Advance by ``token``. Returns False, without a change, when the grammar does not allow it here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether only the end of the text may follow."""
        ...

    @property
    def error(self) -> str:
        """Why the library cannot continue this output, as a text for the client; empty if it can."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by any number of outputs."""

    def matcher(self) -> GrammarPosition:
        """Return a matcher at the start of an output."""
        ...


class GrammarBackend(Protocol):
    """One library. Used by one thread of a process at a time."""

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile a grammar that allows some text.

        Raises:
            GrammarRefused: the grammar is invalid, allows no text, or is too complex to be matched in time.
        """
        ...

    def fill(self, matchers: Sequence[tuple[Any, int]], masks: Masks) -> None:
        """Write the allowed next tokens: row ``index`` of ``masks`` for each (matcher of this backend, index).

        A row is all zeros when no token is allowed. End-of-text tokens are allowed where the grammar may end.
        """
        ...
