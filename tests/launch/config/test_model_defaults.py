"""Settings about what a checkpoint brings: sampling defaults, the chat template, closed objects."""

import json
from pathlib import Path
from typing import Any

import pytest
from configs import config_of

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_defaults import chat_template_source, sampling_defaults
from quire.launch.config.model_folder import DEMO_MODEL
from quire.launch.config.options import parse_options
from quire.protocol.errors import ConfigError


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


class TestSamplingDefaults:
    def test_values_of_the_file(self, tmp_path: Path) -> None:
        given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
        others = {"do_sample": True, "eos_token_id": [1, 2], "bos_token_id": 0, "num_beams": 4, "max_length": 20}
        folder = write(tmp_path, {**given, **others, "max_new_tokens": 2048})
        assert sampling_defaults(folder, "auto") == {**given, "max_tokens": 2048}

    def test_values_without_effect_are_left_out(self, tmp_path: Path) -> None:
        folder = write(tmp_path, {"temperature": 1.0, "top_k": None, "top_p": 1, "repetition_penalty": 1.0})
        assert sampling_defaults(folder, "auto") == {}

    def test_sources(self, tmp_path: Path) -> None:
        own, other = tmp_path / "own", tmp_path / "other"
        own.mkdir()
        other.mkdir()
        write(own, {"temperature": 0.5})
        write(other, {"temperature": 0.25})
        assert sampling_defaults(own, "auto") == {"temperature": 0.5}
        assert sampling_defaults(own, "vllm") == {}
        assert sampling_defaults(own, str(other)) == {"temperature": 0.25}
        assert sampling_defaults(None, "auto") == sampling_defaults(tmp_path, "auto") == {}
        with pytest.raises(ConfigError, match=r"--generation-config must be auto, vllm or a folder with"):
            sampling_defaults(own, str(tmp_path))

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ({"temperature": 3}, "temperature must be a number from 0 to 2 (got 3): correct the file, or start with"),
            ({"top_k": 1.5}, "top_k must be an integer"),
            ({"max_new_tokens": 0}, "max_tokens must be an integer"),
            ("[1]", "cannot be read as a JSON object"),
            ("{", "cannot be read as a JSON object"),
        ],
    )
    def test_a_bad_file_names_its_field(self, tmp_path: Path, content: Any, says: str) -> None:
        with pytest.raises(ConfigError) as refused:
            sampling_defaults(write(tmp_path, content), "auto")
        assert says in str(refused.value) and "generation_config.json" in str(refused.value)

    def test_engine_configuration(self) -> None:
        config = make_engine_config(parse_options({}, "LLM"), folder=DEMO_MODEL)
        assert config.sampling_defaults == {"temperature": 0.7}
        config = make_engine_config(parse_options({"generation_config": "vllm"}, "LLM"), folder=DEMO_MODEL)
        assert config.sampling_defaults == {}


class TestChatTemplate:
    def test_file_or_text(self, tmp_path: Path) -> None:
        path = tmp_path / "template.jinja"
        path.write_text("{{ messages }}")
        assert chat_template_source(str(path)) == chat_template_source("{{ messages }}") == "{{ messages }}"
        assert chat_template_source(None) == chat_template_source("") == ""
        assert config_of(chat_template="{{ 1 }}").chat_template == "{{ 1 }}"

    @pytest.mark.parametrize("given", ["missing.jinja", "{{ unclosed", "{% if %}"])
    def test_refused_before_any_process_starts(self, given: str) -> None:
        with pytest.raises(ConfigError, match="--chat-template"):
            chat_template_source(given)

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "binary"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="--chat-template must be a file"):
            chat_template_source(str(path))


class TestClosedObjects:
    @pytest.mark.parametrize(
        ("given", "closes"),
        [
            (None, True),
            ({}, True),
            ({"disable_additional_properties": False}, False),
            ('{"disable_additional_properties": false}', False),
        ],
    )
    def test_setting(self, given: Any, closes: bool) -> None:
        assert config_of(structured_outputs_config=given).closed_objects is closes

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"backend": "xgrammar"}, "use --structured-outputs-backend"),
            ({"additional_properties": True}, "did you mean disable_additional_properties"),
            ({"disable_additional_properties": 1}, "must be true or false"),
            ("[]", "structured_outputs_config"),
            ("{", "--structured-outputs-config must be a JSON object"),
        ],
    )
    def test_refusals(self, given: Any, says: str) -> None:
        with pytest.raises(ConfigError) as refused:
            config_of(structured_outputs_config=given)
        assert says in str(refused.value)
