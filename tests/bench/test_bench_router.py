"""``quire bench router``: a small run has all figures, within the limit of memory."""

import argparse
import json

import pytest

from quire.bench.router import run
from quire.protocol.errors import ConfigError


def make_args(**values: int) -> argparse.Namespace:
    return argparse.Namespace(**({"engines": 2, "blocks": 6250, "requests": 4, "events": 1000, "json": None} | values))


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    run(make_args())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["benchmark"] == "router" and found["settings"]["blocks"] == 6250
    assert found["results"]["choice"]["1000"]["choose_us"]["mean"] > 0
    assert 0 < found["results"]["index"]["bytes_per_block"] <= 64
    assert 0 < found["results"]["events"]["bytes per block after them"] <= 64


@pytest.mark.parametrize(("name", "value"), [("engines", 1), ("engines", 65), ("blocks", 1), ("requests", 0)])
def test_flags_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--{name} must be from"):
        run(make_args(**{name: value}))
