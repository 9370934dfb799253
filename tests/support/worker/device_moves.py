"""A round trip of blocks between devices and pages, for the tests of a GPU and of Triton's interpreter."""

import random

import numpy as np
from host_pages import Pool, host_memory, move


def round_trip(writer: Pool, reader: Pool, count: int) -> None:
    """Store ``count`` blocks of all groups with one pool, and load them with another, with one bad page."""
    rng = random.Random(count)
    blocks, pages, targets = (rng.sample(range(1, writer.num_blocks), count) for _ in range(3))
    of = [rng.randrange(len(writer.groups)) for _ in range(count)]
    groups = np.array(of, np.int32)
    with host_memory(writer.num_blocks, writer.mover.page_bytes) as memory:
        for pool in {id(pool): pool for pool in (writer, reader)}.values():
            pool.mover.map(memory.message)
        stored = [writer.block(block, group) for block, group in zip(blocks, of, strict=True)]
        assert writer.run(move(False, blocks, pages, 1, groups=groups)).failed == []
        assert [writer.block(block, group) for block, group in zip(blocks, of, strict=True)] == stored
        bad = count // 2
        memory.data(pages[bad])[3] ^= 1
        reader.fill(1)
        others = [block for block in range(reader.num_blocks) if block not in targets]
        before, unchanged = reader.block(targets[bad], of[bad]), [reader.block(block) for block in others]
        answer = reader.run(move(True, targets, pages, 2, groups=groups))
        assert answer.failed == [bad] and f"for block {targets[bad]}: tag" in answer.reason
        loaded = [reader.block(target, group) for target, group in zip(targets, of, strict=True)]
        assert loaded[:bad] == stored[:bad] and loaded[bad + 1 :] == stored[bad + 1 :]
        # Blocks of the CPU's own copy are written as they are compared; those of a device are not.
        assert type(reader) is Pool or loaded[bad] == before
        assert [reader.block(block) for block in others] == unchanged
        for pool in (writer, reader):
            pool.mover.close()
