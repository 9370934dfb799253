"""Quire, a serving engine for large language models.

Public names are imported on first use, so that ``import quire`` and the command line start fast and the scheduler
process does not import modules that only a front end needs.
"""

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.launch.offline.llm import LLM
    from quire.launch.offline.lora_request import LoRARequest
    from quire.launch.offline.request_output import CompletionOutput, RequestOutput
    from quire.protocol.request.logits_processors import (
        AdapterLogitsProcessor,
        AddedRequest,
        BatchUpdate,
        LogitsProcessor,
        MovedRequest,
        MoveDirectionality,
        apply_update,
    )
    from quire.protocol.request.sampling_params import SamplingParams
    from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs
    from quire.protocol.request.structured_outputs import StructuredOutputs as StructuredOutputsParams

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "CompletionOutput",
    "LoRARequest",
    "LogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
    "apply_update",
]

_LOGITS_PROCESSORS = "quire.protocol.request.logits_processors"
_STRUCTURED = "quire.protocol.request.structured_outputs"
# Public name to its module, and to its name there if that differs.
_SOURCES: dict[str, tuple[str, str | None]] = {
    "LLM": ("quire.launch.offline.llm", None),
    "LoRARequest": ("quire.launch.offline.lora_request", None),
    "RequestOutput": ("quire.launch.offline.request_output", None),
    "CompletionOutput": ("quire.launch.offline.request_output", None),
    "SamplingParams": ("quire.protocol.request.sampling_params", None),
    "RepetitionDetection": (_STRUCTURED, None),
    "StructuredOutputs": (_STRUCTURED, None),
    "StructuredOutputsParams": (_STRUCTURED, "StructuredOutputs"),
    **dict.fromkeys(
        (
            *("LogitsProcessor", "AdapterLogitsProcessor", "BatchUpdate", "AddedRequest", "MovedRequest"),
            *("MoveDirectionality", "apply_update"),
        ),
        (_LOGITS_PROCESSORS, None),
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _SOURCES[name]
    return getattr(import_module(module), attribute or name)
