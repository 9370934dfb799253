"""Finds the program of a request without a hint: by blocks that only that program's turns contain."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quire.scheduler_proc.requests.request import Program

NEAR_TOKENS = 64
"""Tokens at the end of a first prompt that the next turn may have changed: a chat template may drop the thinking
marker that it wrote there, and clients add reminders that they do not repeat."""
COMPACTED_TOKENS = 2048
"""Least prefix in common, and half of the least growth, of a program and the turn in which its history was replaced by
a summary. Two first prompts with the same system prompt share as much, but differ little in length."""
MAX_OWNERS = 16
"""Beyond that many programs, a prefix is common and identifies none of them."""


class _Anchor(NamedTuple):
    """A block that identifies its programs: the prefix of ``depth`` blocks that ends with it is in each of them."""

    depth: int
    programs: tuple[Program, ...]


class _Trail:
    """What is known of the turns of one program.

    Attributes:
        num_first_blocks, num_first_tokens: those of its first prompt.
        newest: depths at which prompt and context of its newest turn end.
        kept: anchors in the first prompt; moving: anchors behind it, in the newest turn.
    """

    __slots__ = ("kept", "moving", "newest", "num_first_blocks", "num_first_tokens")

    def __init__(self, num_first_blocks: int, num_first_tokens: int) -> None:
        self.num_first_blocks, self.num_first_tokens = num_first_blocks, num_first_tokens
        self.newest: tuple[int, ...] = ()
        self.kept: list[bytes] = []
        self.moving: list[bytes] = []


class Matcher:
    """Owns the anchors of the programs whose requests do not name them.

    Block hashes are chained: that of block n identifies the first n blocks. A program has at most some 20 anchors of
    about 200 bytes, however long its turns are.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._anchors: dict[bytes, _Anchor] = {}
        self._trails: dict[Program, _Trail] = {}

    def find(self, tenant: int, hashes: Sequence[bytes], num_tokens: int) -> Program | None:
        """Return the program that a prompt continues, or None: it begins one. O(blocks), at most 50 ns each.

        Args:
            hashes: of the prompt's full blocks.
            num_tokens: tokens of the prompt.
        """
        for name in filter(self._anchors.__contains__, reversed(hashes)):
            depth, programs = self._anchors[name]
            if len(programs) > MAX_OWNERS:
                return None
            is_only = len(programs) == 1
            fit = [
                each for each in programs if each.tenant == tenant and self._continues(each, depth, num_tokens, is_only)
            ]
            if len(fit) > 1:  # of two with the same past, the one whose newest turn ends here
                fit = [each for each in fit if depth in self._trails[each].newest]
            if fit:
                return fit[0] if len(fit) == 1 else None
        return None

    def _continues(self, program: Program, depth: int, num_tokens: int, is_only: bool) -> bool:
        """Whether a prompt that has ``depth`` blocks in common with a program, and maybe only it, is its next turn."""
        trail, size = self._trails[program], self._block_size
        if depth > trail.num_first_blocks:  # an answer, or what followed it
            return True
        growth = num_tokens - trail.num_first_tokens
        if depth == trail.num_first_blocks:
            return growth >= size or (growth == 0 and program.is_paused)
        if depth * size + NEAR_TOKENS >= trail.num_first_blocks * size:
            return growth >= size and program.is_paused
        return is_only and program.is_paused and program.num_turns > 1 and growth >= 2 * COMPACTED_TOKENS

    def arrived(self, program: Program, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Note a turn of a program, which is new or was found here."""
        num_blocks = len(hashes)
        trail = self._trails.get(program)
        if trail is None:
            trail = self._trails[program] = _Trail(num_blocks, num_tokens)
            for depth in sorted(self._depths_in_first(num_blocks)):
                self._add(hashes[depth - 1], depth, program, trail.kept)
        first = trail.num_first_blocks
        self._drop(trail.moving, program)
        for depth in (num_blocks, num_blocks - 4, num_blocks - 64):
            if depth > first:
                self._add(hashes[depth - 1], depth, program, trail.moving)
        trail.newest = (num_blocks,)

    def ended(self, program: Program, hashes: Sequence[bytes]) -> None:
        """Note the context of a turn, prompt and output, at its end."""
        trail = self._trails.get(program)
        if trail is None or len(hashes) <= trail.num_first_blocks or hashes[-1] in trail.moving:
            return
        self._add(hashes[-1], len(hashes), program, trail.moving)
        trail.newest = (*trail.newest, len(hashes))

    def forget(self, program: Program) -> None:
        """Forget a program, if it is known here."""
        trail = self._trails.pop(program, None)
        if trail is not None:
            self._drop(trail.kept, program)
            self._drop(trail.moving, program)

    def _depths_in_first(self, num_blocks: int) -> Iterator[int]:
        """Yield the depths of the anchors in a first prompt."""
        size = self._block_size
        if num_blocks:
            yield num_blocks
        if (near := num_blocks - NEAR_TOKENS // size) > 0 and near < num_blocks:
            yield near
        # At fixed depths, so that programs with a common system prompt have common anchors in it.
        num_tokens = COMPACTED_TOKENS
        while (depth := -(-num_tokens // size)) < num_blocks:
            if depth != near:
                yield depth
            num_tokens *= 2

    def _add(self, name: bytes, depth: int, program: Program, names: list[bytes]) -> None:
        known = self._anchors.get(name)
        self._anchors[name] = _Anchor(depth, (program,) if known is None else (*known.programs, program))
        names.append(name)

    def _drop(self, names: list[bytes], program: Program) -> None:
        for name in names:
            depth, programs = self._anchors[name]
            if len(programs) == 1:
                del self._anchors[name]
            else:
                self._anchors[name] = _Anchor(depth, tuple(each for each in programs if each is not program))
        names.clear()

    def check(self) -> None:
        """Raise AssertionError unless anchors and programs refer to each other."""
        for name, (depth, programs) in self._anchors.items():
            for program in programs:
                trail = self._trails[program]
                assert name in (trail.kept if depth <= trail.num_first_blocks else trail.moving), f"lost {program!r}"
        num_names = sum(len(trail.kept) + len(trail.moving) for trail in self._trails.values())
        num_refs = sum(len(anchor.programs) for anchor in self._anchors.values())
        assert num_names == num_refs, f"{num_names} anchors of programs, {num_refs} in the index"
