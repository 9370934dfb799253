"""The shape of a step."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepShape:
    """The sizes on which the duration of a step depends.

    Attributes:
        prefills: (scheduled tokens, context tokens before them) of each request that computes more than one token.
        num_decodes: number of requests that compute one token.
        decode_context: total number of tokens that the decodes attend to.
        num_samples: number of rows that sample.
        longest_decode: context of the longest decode; 0 if unknown.
    """

    prefills: list[tuple[int, int]]
    num_decodes: int
    decode_context: int
    num_samples: int
    longest_decode: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(tokens for tokens, _ in self.prefills)
