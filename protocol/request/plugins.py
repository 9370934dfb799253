"""Loads logits processor plugins and lets them validate requests; does not import torch itself.

Front end, scheduler and worker load the same plugins. CUDA devices are hidden during the import, so that a plugin
cannot initialize a GPU in a process that must not hold one.
"""

import importlib
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from quire.protocol.errors import ConfigError, InvalidRequest
from quire.protocol.request.logits_processors import LogitsProcessor
from quire.protocol.request.sampling_params import SamplingParams

ENTRY_POINT_GROUP = "quire.logits_processors"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
MAX_REASON_LENGTH = 500


def load_logits_processors(names: Sequence[str], excluded: Sequence[str] = ()) -> list[type[LogitsProcessor]]:
    """Return installed plugins, ordered by entry point name, then those of ``names``; duplicates are dropped.

    Args:
        names: ``module:Class`` of each; the class may be nested (``module:Outer.Inner``).
        excluded: entry point names of installed plugins that are not loaded.

    Raises:
        ConfigError: a plugin cannot be used; the text names it and the reason.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    unknown = set(excluded) - {point.name for point in installed}
    if unknown:
        known = ", ".join(point.name for point in installed) or "none"
        raise ConfigError(f"--logits-processors-exclude: {min(unknown)} is not installed (installed: {known})")
    wanted = [point for point in installed if point.name not in excluded]
    found = [_load(f"{point.name} ({point.value})", point.value) for point in wanted]
    found += [_load(name, name) for name in names]
    return list(dict.fromkeys(found))


def check_params(classes: Sequence[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Let every plugin validate a request.

    Raises:
        InvalidRequest: a plugin rejects the request, with the plugin's own text, or fails while validating.
    """
    for cls in classes:
        try:
            cls.validate_params(params)
        except InvalidRequest:
            raise
        except ValueError as error:
            text = one_line(error) or f"logits processor {cls.__name__} rejected the request"
            raise InvalidRequest(text, "extra_args") from error
        except Exception as error:
            raise InvalidRequest(
                f"logits processor {cls.__name__} failed to validate the request: {type(error).__name__}", "extra_args"
            ) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_LENGTH]


def _load(title: str, place: str) -> type[LogitsProcessor]:
    module_name, colon, path = place.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"logits processor {title} must have the form module:Class")
    module = _import(title, module_name)
    try:
        found = operator.attrgetter(path)(module)
    except AttributeError:
        raise ConfigError(f"logits processor {title}: module {module_name} has no {path}") from None
    if not isinstance(found, type):
        raise ConfigError(f"logits processor {title}: {path} is not a class")
    if not issubclass(found, LogitsProcessor):
        raise ConfigError(f"logits processor {title}: {path} is not a subclass of LogitsProcessor")
    return found


def _import(title: str, module_name: str) -> Any:
    used_before = _uses_cuda()
    try:
        with _no_devices():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"logits processor {title}: module {error.name or module_name} not found") from error
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}".rstrip(": ")
        raise ConfigError(f"logits processor {title}: import raised {why}") from error
    if _uses_cuda() and not used_before:
        raise ConfigError(f"logits processor {title}: it uses CUDA during import; use CUDA in __init__ instead")
    return module


def _uses_cuda() -> bool:
    """Whether torch, if imported, has initialized CUDA in this process."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


@contextmanager
def _no_devices() -> Iterator[None]:
    before = os.environ.get(VISIBLE_DEVICES)
    os.environ[VISIBLE_DEVICES] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE_DEVICES]
        else:
            os.environ[VISIBLE_DEVICES] = before
