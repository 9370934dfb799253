"""Sizes with a suffix: as flags, in a config file and as keywords."""

from pathlib import Path

import pytest

from quire.launch.cli import main, parse
from quire.launch.config.command_line import read_options
from quire.launch.config.options import parse_options
from quire.launch.config.sizes import parse_size
from quire.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("32768", 32768), ("32_768", 32768), ("-1", -1), (" 7 ", 7)),
        *(("32k", 32_000), ("1m", 10**6), ("2g", 2 * 10**9), ("1t", 10**12), ("25.6k", 25_600), ("0.0015k", 1)),
        *(("32K", 2**15), ("1M", 2**20), ("2G", 2**31), ("1T", 2**40), ("1.5K", 1536)),
    ],
)
def test_suffixes_are_those_of_vllm(text: str, number: int) -> None:
    assert parse_size(text, "tokens") == parse_size(text, "bytes") == number


def test_binary_units_are_for_bytes() -> None:
    assert [parse_size(text, "bytes") for text in ("4GiB", "512MiB", "1.5KiB")] == [2**32, 2**29, 1536]
    with pytest.raises(ConfigError, match=r"^must be a number of tokens such as 32768, 32k .* \(got '4GiB'\)$"):
        parse_size("4GiB", "tokens")


@pytest.mark.parametrize(
    "text",
    ["", "k", "iB", "4iB", "4giB", "4GB", "4Gib", "4 GiB", "1.5", "1__0", "1_", "٣", "1e9", "9" * 99, "-1k"],
)
def test_other_texts_are_refused_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^must be a number of bytes such as 4294967296, 4GiB, .* \(got '"):
        parse_size(text, "bytes")


def test_flags_and_files_and_keywords_agree(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-model-len: 32k\nkv_cache_memory_bytes: 4GiB\nmax-stored-response-bytes: '1M'\n")
    flags = ["--max-model-len", "32k", "--kv-cache-memory-bytes=4GiB", "--max-stored-response-bytes", "1M"]
    for words in (["--config", str(file)], flags):
        engine, front_end = read_options(parse(["serve", *words]))
        assert (engine.max_model_len, engine.kv_cache_memory_bytes) == (32_000, 2**32)
        assert front_end.max_stored_response_bytes == 2**20
    assert parse_options({"max_model_len": "32K"}, "LLM").max_model_len == 2**15


def test_errors_name_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_model_len: 32kb\n")
    for words, name, status in (
        (["--config", str(file)], "max_model_len", 78),
        (["--max-model-len=32kb"], "--max-model-len", 2),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *words])
        assert ended.value.code == status
        error = capsys.readouterr().err
        assert name in error and "a number of tokens such as 32768, 32k (32,000) or 32K (32,768) (got '32kb')" in error


def test_an_api_key_of_a_wrong_type_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"api_key must be a list of strings$"):
        from quire.frontend.serve_options import ServeOptions
        from quire.launch.config.declared import convert

        convert({"api_key": "secret"}, ServeOptions, "file")
