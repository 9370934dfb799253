"""Finds the program of a request without a hint: by blocks that only that program's turns contain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.scheduler_proc.features.programs.program_state import ProgramState

NEAR_TOKENS = 64
"""Tokens at the end of a first prompt that the next turn may have changed: a chat template may drop the thinking
marker that it wrote there, and clients add reminders that they do not repeat."""
COMPACTED_TOKENS = 2048
"""Least prefix in common, and half of the least growth, of a program and the turn in which its history was replaced by
a summary. Two first prompts with the same system prompt share as much, but differ little in length."""
MAX_OWNERS = 16
"""A prefix that more programs have had is common, and identifies none of them."""


class _Anchor(NamedTuple):
    """A block that identifies programs.

    Attributes:
        depth: blocks of the prefix that ends with it.
        num_programs: programs with this prefix.
        programs: which ones; empty once they were more than MAX_OWNERS.
    """

    depth: int
    num_programs: int
    programs: tuple[ProgramState, ...]


@dataclass(slots=True, eq=False)
class _Trail:
    """The anchors of one program.

    Attributes:
        num_first_blocks, num_first_tokens: those of its first prompt.
        newest: depths at which prompt and context of its newest turn end.
        kept: anchors in the first prompt; moving: those of the newest turn that are no others.
    """

    num_first_blocks: int
    num_first_tokens: int
    newest: tuple[int, ...] = ()
    kept: list[bytes] = field(default_factory=list)
    moving: list[bytes] = field(default_factory=list)


class Matcher:
    """Owns the anchors of the programs whose requests do not name them.

    Block hashes are chained: that of block n identifies the first n blocks. The anchors of a program are the ends of
    its first and of its newest prompt and context, a block shortly before each, and blocks at fixed depths (a grid).
    Programs with a common prefix have the same anchors in it, and where a prompt leaves the grid, it has left all
    programs. A program has at most some 20 anchors of about 200 bytes, for turns of any length.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._anchors: dict[bytes, _Anchor] = {}
        self._trails: dict[ProgramState, _Trail] = {}

    def find(
        self, tenant: int, hashes: Sequence[bytes], num_tokens: int, *, contains_first: bool = False
    ) -> ProgramState | None:
        """Return the program that a prompt continues, or None: it begins one.

        Args:
            hashes: of the prompt's full blocks.
            num_tokens: tokens of the prompt.
            contains_first: only if the prompt contains the whole first prompt of the program, and more.
        """
        anchors = self._anchors
        left = next((depth for depth in self._grid(len(hashes)) if hashes[depth - 1] not in anchors), None)
        within = reversed(hashes if left is None else hashes[: left - 1])
        deepest = next(filter(anchors.__contains__, within), None)
        if deepest is None:
            return None
        depth, number, programs = anchors[deepest]
        fit = [
            each
            for each in programs
            if each.tenant == tenant
            and self._continues(each, depth, num_tokens, is_only=number == 1)
            and (not contains_first or self._contains_first(each, depth, num_tokens))
        ]
        if len(fit) > 1:  # of several with the same past, the one whose newest turn ends here
            fit = [each for each in fit if depth in self._trails[each].newest]
        return fit[0] if len(fit) == 1 else None

    def _contains_first(self, program: ProgramState, depth: int, num_tokens: int) -> bool:
        trail = self._trails[program]
        return depth >= trail.num_first_blocks and num_tokens > trail.num_first_tokens

    def _continues(self, program: ProgramState, depth: int, num_tokens: int, *, is_only: bool) -> bool:
        """Whether a prompt that has ``depth`` blocks in common with a program, and maybe only it, is its next turn."""
        trail, size = self._trails[program], self._block_size
        if depth > trail.num_first_blocks:  # an answer, or what followed it
            return True
        growth = num_tokens - trail.num_first_tokens
        is_second = trail.num_first_blocks in trail.newest
        if is_second and depth == trail.num_first_blocks and growth >= size:
            return True
        if not program.is_paused:
            return False
        if is_second and (trail.num_first_blocks - depth) * size <= NEAR_TOKENS:
            return growth >= size or (growth == 0 and depth == trail.num_first_blocks)
        is_long = depth * size >= COMPACTED_TOKENS and growth >= 2 * COMPACTED_TOKENS
        return is_only and is_long and program.num_turns > 1

    def arrived(self, program: ProgramState, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Note a turn of a program, which is new or was found here."""
        num_blocks = len(hashes)
        trail = self._trails.get(program)
        if trail is None:
            trail = self._trails[program] = _Trail(num_blocks, num_tokens)
            ends = num_blocks, num_blocks - NEAR_TOKENS // self._block_size
            for depth in {*self._grid(num_blocks), *(end for end in ends if end > 0)}:
                self._add(hashes[depth - 1], depth, program, trail.kept)
        depths = [self._anchors[name].depth for name in trail.moving]
        common = [d for d, name in zip(depths, trail.moving, strict=True) if d <= num_blocks and hashes[d - 1] == name]
        self._drop(trail.moving, program)
        trail.newest = ()
        # The last end before this turn stays: the client may change its last message, or send two turns at once.
        self._move(program, trail, hashes, {num_blocks, num_blocks - 4, max(common, default=0)})

    def ended(self, program: ProgramState, hashes: Sequence[bytes]) -> None:
        """Note the context of a turn, prompt and output, at its end."""
        if (trail := self._trails.get(program)) is not None:
            self._move(program, trail, hashes, {len(hashes)})

    def _move(self, program: ProgramState, trail: _Trail, hashes: Sequence[bytes], ends: set[int]) -> None:
        """Add the anchors of a turn that are missing."""
        beyond = {end for end in ends if end > trail.num_first_blocks}
        for depth in sorted({*self._grid(len(hashes)), *beyond}):
            if (name := hashes[depth - 1]) not in trail.kept and name not in trail.moving:
                self._add(name, depth, program, trail.moving)
        trail.newest = (*trail.newest, len(hashes))

    def forget(self, program: ProgramState) -> None:
        """Forget a program, if it is known here."""
        trail = self._trails.pop(program, None)
        if trail is not None:
            self._drop(trail.kept, program)
            self._drop(trail.moving, program)

    def _grid(self, num_blocks: int) -> Iterator[int]:
        """Yield the fixed depths up to ``num_blocks``."""
        if num_blocks:
            yield 1
        depth = -(-COMPACTED_TOKENS // self._block_size)
        while depth <= num_blocks:
            yield depth
            depth *= 2

    def _add(self, name: bytes, depth: int, program: ProgramState, names: list[bytes]) -> None:
        names.append(name)
        known = self._anchors.get(name)
        if known is None:
            self._anchors[name] = _Anchor(depth, 1, (program,))
            return
        programs = (*known.programs, program) if known.programs and known.num_programs < MAX_OWNERS else ()
        self._anchors[name] = _Anchor(depth, known.num_programs + 1, programs)

    def _drop(self, names: list[bytes], program: ProgramState) -> None:
        for name in names:
            depth, number, programs = self._anchors[name]
            if number == 1:
                del self._anchors[name]
            else:
                programs = tuple(each for each in programs if each is not program)
                self._anchors[name] = _Anchor(depth, number - 1, programs)
        names.clear()

    def check(self) -> None:
        """Raise AssertionError unless anchors and programs refer to each other."""
        counts = dict.fromkeys(self._anchors, 0)
        for program, trail in self._trails.items():
            names = [*trail.kept, *trail.moving]
            assert len(set(names)) == len(names), f"{program!r} has an anchor twice"
            for name in names:
                counts[name] += 1
                programs = self._anchors[name].programs
                assert not programs or program in programs, f"an anchor has lost {program!r}"
        assert counts == {name: anchor.num_programs for name, anchor in self._anchors.items()}, (
            "wrong counts of anchors"
        )
