"""Forks: requests that continue the tokens of another one share its full blocks, and copy its partly filled block."""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.scheduler_proc.kv.block import KVCacheBlock
from quire.scheduler_proc.kv.block_pool import BlockPool
from quire.scheduler_proc.kv.coordinator import KVCacheCoordinator


@dataclass(slots=True)
class _Copy:
    """A copy that was not sent to the workers. ``is_written``: the source has its content before the next step.

    The source is held, so that nothing else is written to it before the copy. The target belongs to the child.
    """

    source: KVCacheBlock
    target: KVCacheBlock
    is_written: bool


class BlockForks:
    """Gives a request the blocks of another one, and owns the copies that no step has had yet."""

    def __init__(self, coordinator: KVCacheCoordinator, pool: BlockPool) -> None:
        self._coordinator, self._pool = coordinator, pool
        self._copies: dict[int, list[_Copy]] = {}
        """By handle of the child."""

    def __contains__(self, child: int) -> bool:
        """Whether the block that a child writes on has not been copied by a sent step."""
        return child in self._copies

    def can_fork(self, parent: int, num_tokens: int) -> bool:
        """Return whether the parent still has all blocks that a token after the first ``num_tokens`` reads."""
        return all(manager.can_share(parent, num_tokens) for manager in self._coordinator.managers)

    def fork(
        self, parent: int, child: int, num_shared_tokens: int, num_tokens: int, keep_free: int, *, is_written: bool
    ) -> bool:
        """Give a child blocks for ``num_tokens`` positions, the first of which it shares with its parent.

        Args:
            parent, child: handles. The parent's full blocks are cached, if anything is.
            num_shared_tokens: positions of the parent that have been sent, or are part of the step being planned.
            keep_free: blocks that must remain free.
            is_written: whether all shared positions have been sent before the step being planned.

        Returns whether enough blocks were free; otherwise nothing has changed.
        """
        managers = self._coordinator.managers
        # Counted for all groups before anything is shared, for the same reason as in an allocation: nothing must be
        # undone.
        own = sum(-(-num_tokens // m.block_size) - num_shared_tokens // m.block_size for m in managers)
        if own > self._pool.num_free_blocks - keep_free:
            return False
        tails = [manager.share(parent, child, num_shared_tokens) for manager in managers]
        new = self._coordinator.allocate(child, num_tokens)
        copies = [_Copy(tail, of[0], is_written) for tail, of in zip(tails, new, strict=True) if tail is not None]
        if copies:
            # A reference of its own, because the parent may end, and free the source, before the step with the copy is
            # sent.
            self._pool.touch([copy.source for copy in copies])
            self._copies[child] = copies
        return True

    def take(self) -> list[tuple[int, int]]:
        """Return the ids of (source, target) of the copies for the step being sent; the others are for the next one."""
        taken: list[tuple[int, int]] = []
        for child, copies in list(self._copies.items()):
            # A parent that computes in the step that is being planned still writes to the source. Workers copy before
            # they compute, so the copy waits for the next step.
            if copies[0].is_written:
                taken += [(copy.source.block_id, copy.target.block_id) for copy in copies]
                self.forget(child)
            else:
                for copy in copies:
                    copy.is_written = True
        return taken

    def forget(self, child: int) -> None:
        """Release what the copies of a child hold, if it has any."""
        self._pool.free_blocks([copy.source for copy in self._copies.pop(child, ())])

    def holders(self) -> Iterator[list[KVCacheBlock]]:
        """Yield what each child's copies hold."""
        for copies in self._copies.values():
            yield [copy.source for copy in copies]

    def check(self) -> None:
        """Raise AssertionError unless each copy is for a request that has its target."""
        held = [manager.req_to_blocks for manager in self._coordinator.managers]
        for child, copies in self._copies.items():
            blocks = [block for of in held for block in of.get(child, ())]
            assert all(copy.target in blocks for copy in copies), f"handle {child} does not hold what is copied for it"
