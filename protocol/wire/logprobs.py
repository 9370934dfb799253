"""How log probabilities lie in the arrays of a message: parts of ``StepOutputs`` and ``ModelRunnerOutput``."""

import msgspec


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Which of the message's tokens have log probabilities, and how they lie in the three frames beside it.

    ``rows``: indices into the message's tokens. The frames hold ``len(rows) * width`` entries, row-major; column 0
    is the sampled token, the others the best ones in falling order. ``ranks``: of the sampled token, from 1.
    """

    rows: list[int]
    width: int


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of prompt tokens, and how they lie in the three frames beside it.

    Entry ``i`` is of request ``handles[i]``: its prompt tokens ``starts[i]`` to ``starts[i] + counts[i]`` (the first
    token has none, so a start is 1 at least). The frames hold the entries one after the other, ``width`` values per
    token: column 0 is the prompt's own token, the others are the best ones in falling order.

    After a preemption a part may come a second time.
    """

    handles: list[int]
    starts: list[int]
    counts: list[int]
    width: int
