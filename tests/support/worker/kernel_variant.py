"""One specialisation of a Triton kernel, as the files in ``tests/kernels/ahead`` list them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TRITON_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel; ``types`` are those of its arguments that are not 32-bit integers."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, int]
    options: Mapping[str, int]
