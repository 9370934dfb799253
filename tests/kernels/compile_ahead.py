"""Compile every Triton kernel ahead of time for several GPU generations, and print the resources of each variant.

It needs no GPU. It is a separate program, because a process with TRITON_INTERPRET=1 cannot compile. Run
``python -P tests/kernels/compile_ahead.py``: it prints a table and, as its last line, the same data as JSON.
Compilation takes almost a second per kernel and GPU: ``--capabilities 90`` selects one GPU generation.
"""

import argparse
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support" / "worker"))

from kernel_variant import Variant  # noqa: E402

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Maximum shared memory bytes of a thread block, by compute capability (source: CUDA programming guide)."""

STACK_LIMIT = 64
"""Maximum stack bytes of a thread, to which registers spill. Compiler versions differ by a few bytes; a tile that is
too large for its threads spills hundreds."""


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled variant; registers and stack bytes of a thread are None without cuobjdump."""

    variant: str
    capability: int
    registers: int | None
    stack_bytes: int | None
    shared_bytes: int


def variants() -> Iterator[Variant]:
    """Yield the variants that the files in ``ahead`` list."""
    for path in sorted((HERE / "ahead").rglob("*.py")):
        yield from runpy.run_path(str(path))["variants"]()


def compile_variant(variant: Variant, capability: int) -> Usage:
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    # As in most launches: Triton specialises on pointers and strides that are divisible by 16.
    divisible = [i for i, name in enumerate(names) if signature[name][0] == "*" or "stride" in name]
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options))
    registers, stack_bytes = resources(compiled.asm["cubin"])
    return Usage(variant.name, capability, registers, stack_bytes, compiled.metadata.shared)


def resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Return the registers and stack bytes of a thread; registers that do not fit are spilled to the stack."""
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError:
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        dump = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    assert found is not None, dump
    return int(found[1]), int(found[2])


def as_page(usages: list[Usage], capabilities: Collection[int]) -> str:
    """Format a page of docs/figures: registers and stack bytes of a thread, shared memory of a program."""
    lines = [
        "# Compiled kernels",
        "",
        f"Registers / stack bytes / shared memory, as compiled by Triton {triton.__version__} without a GPU "
        "(`python -P tests/kernels/compile_ahead.py --write FILE`). Stack bytes are what registers spill to.",
        "",
        "| kernel | " + " | ".join(f"sm_{capability}" for capability in capabilities) + " |",
        "|---" * (1 + len(capabilities)) + "|",
    ]
    rows: dict[str, list[str]] = {}
    for usage in usages:
        rows.setdefault(usage.variant, []).append(f"{usage.registers} / {usage.stack_bytes} / {usage.shared_bytes}")
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel ahead of time, without a GPU.")
    capabilities = ",".join(map(str, SHARED_MEMORY_LIMIT))
    parser.add_argument("--capabilities", default=capabilities, metavar="A,B", help=f"some of {capabilities}")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures to FILE as a Markdown page")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    limits = {int(capability): SHARED_MEMORY_LIMIT[int(capability)] for capability in args.capabilities.split(",")}
    failures = []
    usages = []
    print(f"{'variant':44} {'sm':>4} {'registers':>9} {'stack':>6} {'shared':>7}")
    for variant in variants():
        for capability, limit in limits.items():
            usage = compile_variant(variant, capability)
            usages.append(usage)
            registers = "?" if usage.registers is None else usage.registers
            stack = "?" if usage.stack_bytes is None else usage.stack_bytes
            print(f"{usage.variant:44} {capability:>4} {registers:>9} {stack:>6} {usage.shared_bytes:>7}", flush=True)
            if usage.shared_bytes > limit:
                failures.append(f"{usage.variant}, sm_{capability}: shared memory above {limit}")
            if usage.stack_bytes is not None and usage.stack_bytes > STACK_LIMIT:
                failures.append(f"{usage.variant}, sm_{capability}: registers spill, stack above {STACK_LIMIT}")
    for failure in failures:
        print(f"FAILED: {failure}")
    if args.write:
        args.write.write_text(as_page(usages, limits), encoding="utf-8")
    print(json.dumps({"triton": triton.__version__, "failures": failures, "usages": [asdict(u) for u in usages]}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
