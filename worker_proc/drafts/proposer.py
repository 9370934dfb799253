"""The interface of proposers of draft tokens."""

from collections.abc import Mapping
from typing import Protocol


class Proposer(Protocol):
    """Proposes drafts at the start of a step, when the host knows all tokens so far.

    A proposer with state per request registers with the batch as a RowStore, or derives it from the batch's tokens.
    """

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Propose drafts for some rows.

        Args:
            wanted: row → maximum number of drafts.

        Returns:
            row → its drafts, token ids of the model's vocabulary. A row without drafts may be absent.
        """
        ...
