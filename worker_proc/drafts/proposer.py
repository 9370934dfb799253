"""The seam between the step and whoever guesses at its next tokens."""

from collections.abc import Mapping
from typing import Protocol


class Proposer(Protocol):
    """Makes drafts as a step begins, when the host knows every token so far.

    What it keeps per request, it registers with the batch as a RowStore, or derives from the batch's tokens.
    """

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafts of some rows.

        Args:
            wanted: row → how many at most.

        Returns:
            row → its drafts, token ids of the model's vocabulary; a row without any may be absent.
        """
        ...
