"""The shape of a step: what its duration depends on."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepShape:
    """What a step's duration depends on.

    Attributes:
        prefills: (new tokens, tokens of context before them) of each request that computes more than one token.
        num_decodes: requests that compute one token.
        decode_context: tokens that these attend to, added up.
        num_samples: rows that sample.
        longest_decode: what the one with the longest context attends to; 0: not known.
    """

    prefills: list[tuple[int, int]]
    num_decodes: int
    decode_context: int
    num_samples: int
    longest_decode: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(tokens for tokens, _ in self.prefills)
