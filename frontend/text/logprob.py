"""Log probabilities with the texts of their tokens."""

from dataclasses import dataclass

from quire.frontend.text.text_out import TokenTexts
from quire.protocol.wire.logprobs import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """One token's log probability. ``rank`` counts from 1; ``decoded_token`` is the text of the token alone."""

    logprob: float
    rank: int
    decoded_token: str


def logprob_by_id(entry: TokenLogprobs, texts: TokenTexts, *, lowest: float = float("-inf")) -> dict[int, Logprob]:
    """Return one position's log probabilities by token id, each at least ``lowest``."""
    found = {
        token: Logprob(max(value, lowest), rank, texts.text(token)) for rank, (token, value) in enumerate(entry.top, 1)
    }
    found[entry.token_id] = Logprob(max(entry.logprob, lowest), entry.rank, texts.text(entry.token_id))
    return found
