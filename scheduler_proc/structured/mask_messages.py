"""Messages between the scheduler process and the processes that compute bitmasks (helpers)."""

from typing import TypeAlias

import msgspec

from quire.protocol.request.structured_outputs import StructuredOutputs


class Prepare(msgspec.Struct, frozen=True, tag=1):
    """Compile a grammar and keep it under a number. Answered by Prepared."""

    grammar: int
    wanted: StructuredOutputs


class Begin(msgspec.Struct, frozen=True, tag=2):
    """Begin an output of a prepared grammar.

    Attributes:
        prompt: int32 token ids to search for thinking markers, if the model has any; otherwise empty.
        expects_thought: the request has a thinking budget.
    """

    output: int
    grammar: int
    prompt: bytes
    expects_thought: bool


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One output: its tokens that were not sent before, and the draft tokens after them."""

    output: int
    tokens: list[int]
    drafts: list[int]


class Fill(msgspec.Struct, frozen=True, tag=3):
    """Compute the masks of outputs. Answered by one or more Filled with the same number.

    Attributes:
        places: rows of the shared memory for the masks, in order: one for each output, and one for each of its drafts.
    """

    ask: int
    rows: list[Row]
    places: list[int]


class Forget(msgspec.Struct, frozen=True, tag=4):
    """Drop the state of outputs and grammars. Outputs keep their grammar."""

    outputs: list[int] = []
    grammars: list[int] = []


ToHelper: TypeAlias = Prepare | Begin | Fill | Forget


class Started(msgspec.Struct, frozen=True, tag=11):
    """The helper reads messages. ``pid``: its process."""

    pid: int


class Prepared(msgspec.Struct, frozen=True, tag=12):
    """A grammar was compiled, or was refused for ``reason``."""

    grammar: int
    reason: str


class Filled(msgspec.Struct, frozen=True, tag=13):
    """The masks of some outputs are in the shared memory.

    Attributes:
        seconds: CPU time that was spent on a single output; 0 for several.
        reasons: why the requests of some of these outputs fail instead.
    """

    ask: int
    outputs: list[int]
    seconds: float = 0.0
    reasons: dict[int, str] = {}


class Grown(msgspec.Struct, frozen=True, tag=14):
    """The helper's memory has grown by ``num_bytes`` since it started."""

    num_bytes: int


FromHelper: TypeAlias = Started | Prepared | Filled | Grown
