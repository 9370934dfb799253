"""``--config`` files: plain values as written, and an error of one line, soon, for everything else."""

import time
from pathlib import Path
from typing import Any

import pytest

from quire.launch.config.config_file import MAX_BYTES, read_config_file
from quire.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("12", 12), ("-3", -3), ("+4", 4), ("1_000", 1000), ("0x1f", 31), ("0", 0)),
        *(("1.5", 1.5), ("1e3", 1000.0), ("2.5e-3", 0.0025), (".5", 0.5), ("5.", 5.0), (".inf", float("inf"))),
        *(("true", True), ("No", False), ("~", None), ("", None), ("auto", "auto"), ("127.0.0.1", "127.0.0.1")),
        *(("1:2:3", "1:2:3"), ("1:30.5", "1:30.5"), ("010", "010"), ("2024-01-01", "2024-01-01"), ("1e", "1e")),
        *(('"12"', "12"), ("[a, 1]", ["a", 1]), ("{b: {c: 2}}", {"b": {"c": 2}})),
    ],
)
def test_values_are_what_they_look_like(tmp_path: Path, text: str, value: Any) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"port: {text}\n")
    found = read_config_file(file)
    assert found == {"port": value} and type(found["port"]) is type(value)


def test_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("# nothing\n")
    assert read_config_file(file) == {}


REFUSED = {
    "a list": ("- 1\n", "must be a YAML mapping"),
    "two documents": ("a: 1\n---\nb: 2\n", "expected a single document"),
    "a key twice": ("port: 1\nhost: a\nport: 2\n", "a key occurs twice in this mapping"),
    "a merge": ("a: &a\n  b: 1\n  <<: *a\n", "anchors and aliases are not supported"),
    "an alias": ("a: *b\n", "anchors and aliases are not supported"),
    "an anchor": ("a: &b 1\n", "anchors and aliases are not supported"),
    "a tag": ("port: !!int '1:2:3'\n", "tags such as 'tag:yaml.org,2002:int' are not supported"),
    "an object": ("a: !!python/object/apply:os.system ['id']\n", "tags such as"),
    "a list as key": ("? [a]\n: 1\n", "found unhashable key"),
    "brackets": ("a: " + "[" * 100_000, "nested at most 16 levels deep"),
    "braces": ("{a: " * 60_000, "nested at most 16 levels deep"),
    "dashes": ("- " * 100_000 + "1", "nested at most 16 levels deep"),
    "digits": ("port: " + "9" * 200_000, "Exceeds the limit"),
    "NUL": ("a: \0\n", "special characters are not allowed"),
    "no UTF-8": (b"a: \xff\xfe\n", "can't decode byte"),
    "large": ("a: 1\n" + "#" * MAX_BYTES, f"must be at most {MAX_BYTES} bytes"),
}


@pytest.mark.parametrize(("text", "expected"), REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused_soon(tmp_path: Path, text: str | bytes, expected: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_config_file(file)
    assert str(caught.value).startswith(f"{file}: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert time.process_time() - began < 5


def test_endless_file() -> None:
    with pytest.raises(ConfigError, match=f"/dev/zero: the file must be at most {MAX_BYTES} bytes"):
        read_config_file(Path("/dev/zero"))
