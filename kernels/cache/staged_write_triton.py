"""Triton kernel of ``staged_write.write_runs``. Only that launcher may import it, because it imports triton."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
# Arguments have no annotations, because Triton compiles annotations too and rejects most of them.

import triton
import triton.language as tl


# The buffer's length changes from step to step; without do_not_specialize Triton compiles two variants.
@triton.jit(do_not_specialize=["num_words", "num_tables"])
def staged_write_kernel(
    packed, tables, num_words, num_tables,
    HEADER_WORDS: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Program ``i`` writes run ``i``; ``tables`` is ``pointer_table.TableSet.descriptions``."""
    header = packed + tl.program_id(0) * HEADER_WORDS
    index = tl.load(header)
    row = tl.load(header + 1).to(tl.int64)
    start = tl.load(header + 2)
    length = tl.load(header + 3)
    offset = tl.load(header + 4)
    if (index < 0) | (index >= num_tables):
        return
    description = tables + index * 5
    table = tl.load(description).to(tl.pointer_type(tl.int32))
    row_stride = tl.load(description + 1)
    num_rows = tl.load(description + 2)
    num_columns = tl.load(description + 3)
    if (row < 0) | (row >= num_rows):
        return
    target = table + row * row_stride
    for tile_start in range(0, length, TILE_WORDS):
        word = tile_start + tl.arange(0, TILE_WORDS)
        column = start + word
        source = offset + word
        in_run = (word < length) & (source >= 0) & (source < num_words)
        value = tl.load(packed + source, mask=in_run, other=0)
        tl.store(target + column, value, mask=in_run & (column >= 0) & (column < num_columns))
