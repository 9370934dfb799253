"""The reader of each stored format."""

from collections.abc import Sequence

import torch

from quire.kernels.common.block_weight import BLOCK_TYPES
from quire.protocol.model.weight_format import WeightFormat
from quire.worker_proc.models.formats.awq import read_awq
from quire.worker_proc.models.formats.compressed_tensors import read_packed, read_plain_codes
from quire.worker_proc.models.formats.gguf import BlockLinear, read_gguf
from quire.worker_proc.models.formats.gptq import read_gptq
from quire.worker_proc.models.formats.nvfp4 import read_modelopt_nvfp4, read_nvfp4
from quire.worker_proc.models.formats.online import read_online
from quire.worker_proc.models.formats.quantised import QuantisedLinear, Reader
from quire.worker_proc.models.weight_slot import Cut

READERS: dict[str, Reader] = {
    "pack-quantized": read_packed,
    "int-quantized": read_plain_codes,
    "float-quantized": read_plain_codes,
    "nvfp4-pack-quantized": read_nvfp4,
    "modelopt-nvfp4": read_modelopt_nvfp4,
    "fp8": read_plain_codes,
    "gptq": read_gptq,
    "awq": read_awq,
    "online": read_online,
    "gguf": read_gguf,
}


def quantised_linear(
    form: WeightFormat,
    cuts: Sequence[Cut],
    bias: torch.nn.Parameter | None,
    layer: str,
    device: torch.device | str,
    *,
    stored_bias: bool,
    float32_output: bool = False,
) -> QuantisedLinear | BlockLinear:
    """Allocate a quantised layer; see ``QuantisedLinear`` and ``BlockLinear``."""
    if form.kind in BLOCK_TYPES or (form.layout == "gguf" and torch.device(device).type == "cpu"):
        return BlockLinear(form, cuts, bias, layer, device, stored_bias=stored_bias, float32_output=float32_output)
    reader = READERS[form.layout]
    return QuantisedLinear(
        form, cuts, bias, layer, reader, device, stored_bias=stored_bias, float32_output=float32_output
    )
