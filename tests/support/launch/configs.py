"""Engine configurations as a user's flags give them."""

from typing import Any

from scheduler_driver import make_config

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import parse_options
from quire.protocol.config import EngineConfig

MODEL = make_config().model


def config_of(**options: Any) -> EngineConfig:
    return make_engine_config(parse_options(options, "LLM"), MODEL)
