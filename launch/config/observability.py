"""Checks of the settings of metrics and tracing, before a process is started."""

import importlib.util
import re
from urllib.parse import urlsplit

from quire.protocol.errors import ConfigError


def check_metrics_prefix(prefix: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", prefix):
        raise ConfigError(
            f"--metrics-prefix must be 1 to 64 letters, digits and underscores, and not begin with a digit "
            f"(got {prefix[:64]!a})"
        )


def check_tracing(endpoint: str) -> None:
    """Raise ConfigError unless spans can be sent to ``endpoint``; an empty one means no tracing."""
    if not endpoint:
        return
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL such as http://localhost:4318/v1/traces (got {endpoint[:64]!a})"
        )
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(module):
            raise ConfigError(f"--otlp-traces-endpoint needs the package {module}: install Quire with its extra otel")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
