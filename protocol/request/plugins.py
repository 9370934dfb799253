"""Loads logits processors that others wrote, and asks them about requests; without torch of its own.

Front end, scheduler and worker load the same ones. None of them may find a GPU taken, or hidden, because a plugin
looked at it while it was imported: so there is none to see meanwhile.
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


def load_logits_processors(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """Installed plugins by the names of their entry points, then those of ``names``; one found twice counts once.

    Args:
        names: ``module:Class`` of each; the class may be nested (``module:Outer.Inner``).

    Raises:
        ConfigError: one cannot be used; names it and says why.
    """
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    found = [_load(f"{point.name} ({point.value})", point.value) for point in installed]
    found += [_load(name, name) for name in names]
    return list(dict.fromkeys(found))


def check_params(classes: Sequence[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Ask every plugin about a request.

    Raises:
        InvalidRequest: one refuses it, in its own words, or fails at looking at it.
    """
    for cls in classes:
        try:
            cls.validate_params(params)
        except InvalidRequest:
            raise
        except ValueError as error:
            said = one_line(error) or f"logits processor {cls.__name__} refuses the request"
            raise InvalidRequest(said, "extra_args") from error
        except Exception as error:
            raise InvalidRequest(
                f"logits processor {cls.__name__} failed at checking the request: {type(error).__name__}", "extra_args"
            ) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:MAX_REASON_LENGTH]


def _load(title: str, place: str) -> type[LogitsProcessor]:
    module_name, colon, path = place.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"logits processor {title} must be written as module:Class")
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
        raise ConfigError(f"logits processor {title}: there is no module {error.name or module_name}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)}".rstrip(": ")
        raise ConfigError(f"logits processor {title}: its import raised {why}") from error
    if _uses_cuda() and not used_before:
        raise ConfigError(f"logits processor {title}: it uses CUDA while it is imported; do so in __init__")
    return module


def _uses_cuda() -> bool:
    """Whether torch, if it is imported, has taken a CUDA device in this process."""
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
