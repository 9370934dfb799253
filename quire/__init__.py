"""Quire, a serving engine for large language models.

The public names load on first use, so that ``import quire`` and the command line stay fast and the scheduler
process never imports what only a front end needs.
"""

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.launch.llm import LLM
    from quire.launch.request_output import CompletionOutput, RequestOutput
    from quire.protocol.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "quire.launch.llm",
    "RequestOutput": "quire.launch.request_output",
    "CompletionOutput": "quire.launch.request_output",
    "SamplingParams": "quire.protocol.sampling_params",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
