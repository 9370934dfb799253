"""Layouts of models of transformers, measured in the process of the test."""

from pathlib import Path

import msgspec
import pytest

from quire.launch.config import measured_layouts
from quire.protocol.model.measured_config import MeasuredConfig, Refused
from quire.worker_proc.models.transformers import measure as measuring


def measured(settings: str) -> MeasuredConfig | Refused:
    return msgspec.msgpack.decode(measuring.answer(settings.encode()), type=MeasuredConfig | Refused)


def measure_here(patch: pytest.MonkeyPatch) -> None:
    """Measure in this process, which has imported transformers already, and keep nothing."""

    def measure(path: Path, settings: str) -> MeasuredConfig | Refused:
        return measured(settings)

    patch.setattr(measured_layouts, "_measure", measure)
    patch.setattr(measured_layouts, "_kept_file", lambda key: None)
