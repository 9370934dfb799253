"""The GPU's decode step in Triton's interpreter: runs ``interpreted/decode_step.py`` as a separate program."""

import importlib.util

import pytest


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_decode_step_in_the_interpreter(side_run: str) -> None:
    assert " passed" in side_run
