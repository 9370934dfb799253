"""Startup of a worker: streams pause for as long as it takes, when a worker is replaced."""

import subprocess
import sys

import pytest

START = """
import resource, sys
from quire.launch.config.model_folder import find_model
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import EngineOptions
from quire.protocol.model.kv_layout import kv_layout
from quire.worker_proc.startup.setup import make_runner
config = make_engine_config(EngineOptions(dtype="float32", device="cpu"), folder=find_model(None))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
runner, ready = make_runner(config, layout)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert "torch._dynamo" not in sys.modules, "the compiler was imported: seconds"
assert grown < ready.plan.kv_cache // 4, f"the KV cache was written: {grown} bytes"
"""


@pytest.mark.slow
def test_imports_no_compiler_and_writes_no_cache() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", START], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
