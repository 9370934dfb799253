"""``quire bench embed``: refused flags, and one whole run beside sentence-transformers."""

import argparse
import json
from pathlib import Path

import pytest

from quire.bench import embed
from quire.bench.embed import run
from quire.launch.cli import parse
from quire.launch.config.options import EngineOptions
from quire.protocol.errors import ConfigError


def arguments(**changed: object) -> argparse.Namespace:
    flags = ["--num-texts", "3", "--input-len", "5", "--rounds", "1", "--threads", "1"]
    return argparse.Namespace(**(vars(parse(["bench", "embed", *flags])) | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "give either MODEL or --shape"),
        ({"shape": "bge-huge"}, "--shape bge-huge: unknown shape"),
        ({"shape": "bge-base", "against": "fastembed"}, "--against fastembed: unknown peer"),
        ({"shape": "bge-base", "num_texts": 0}, "--num-texts must be at least 1"),
        ({"shape": "bge-base", "threads": 0}, "--threads must be from 1 to 1024"),
    ],
)
def test_contradicting_flags_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(arguments(**changed), EngineOptions(device="cpu"))


@pytest.mark.full
def test_both_sides_are_measured_on_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    monkeypatch.setitem(embed.SHAPES, "tiny", embed.SHAPES["bge-base"] | tiny | {"intermediate_size": 48})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the benchmark sets it; it is restored afterwards
    file = tmp_path / "found.json"
    run(arguments(shape="tiny", against="sentence-transformers", json=file), EngineOptions(device="cpu"))
    found = json.loads(file.read_text())["results"]["contestants"]
    assert list(found) == [
        "quire",
        "sentence-transformers, one call",
        "sentence-transformers, one text a call",
    ]
    assert all(own["texts_per_s"] > 0 and len(own["seconds"]) == 1 for own in found.values())
