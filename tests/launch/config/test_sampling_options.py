"""Sampling flags: speculative decoding, logits processors, thinking markers, the grammar library."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from configs import MODEL, config_of
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import quire
from quire.launch.cli import main, parse
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import DEMO_MODEL
from quire.launch.config.options import EngineOptions, parse_options
from quire.launch.config.sampling_options import import_paths, processor_name, thinking_markers
from quire.launch.offline.terminal import _sampling
from quire.launch.supervision.child_process import python_path
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import MoeConfig
from quire.protocol.request.logits_processors import AdapterLogitsProcessor, LogitsProcessor

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


class TestSpeculative:
    def test_off_by_default(self) -> None:
        config = config_of()
        assert (config.speculative, config.num_speculative_tokens) == (None, 0)

    @pytest.mark.parametrize("form", [dict, json.dumps])
    def test_ngram(self, form: Any) -> None:
        given = form({**NGRAM, "prompt_lookup_max": 4, "prompt_lookup_min": 3, "adaptive": False})
        config = config_of(speculative_config=given)
        assert config.speculative is not None
        assert config.num_speculative_tokens == 3
        chosen = config.speculative
        assert (chosen.method, chosen.prompt_lookup_min, chosen.prompt_lookup_max) == ("ngram", 3, 4)
        assert (chosen.acceptance, chosen.adaptive) == ("shared_noise", False)

    @pytest.mark.parametrize(("given", "lengths"), [({}, (2, 5)), ({"min": 3}, (3, 3)), ({"max": 4}, (4, 4))])
    def test_one_length_sets_both(self, given: dict[str, int], lengths: tuple[int, int]) -> None:
        keys = {f"prompt_lookup_{name}": value for name, value in given.items()}
        chosen = config_of(speculative_config={**NGRAM, **keys}).speculative
        assert chosen is not None
        assert (chosen.prompt_lookup_min, chosen.prompt_lookup_max) == lengths

    def test_suffix_has_its_own_default_number_of_drafts(self) -> None:
        config = config_of(speculative_config={"method": "suffix"})
        assert config.speculative is not None
        assert (config.num_speculative_tokens, config.speculative.suffix_max_cached_requests) == (24, 1000)
        keys = {"suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_cached_requests": 0}
        config = config_of(speculative_config={"method": "suffix", **keys})
        assert config.speculative is not None
        assert (config.num_speculative_tokens, config.speculative.suffix_max_depth) == (8, 8)
        assert config.speculative.suffix_max_cached_requests == 0

    def test_token_budget_has_room_for_all_drafts(self) -> None:
        config = config_of(speculative_config=NGRAM, max_num_seqs=1024)
        assert config.max_num_batched_tokens == 4096
        with pytest.raises(ConfigError, match=r"must be at least 40 .*not 39"):
            config_of(speculative_config=NGRAM, max_num_seqs=10, max_num_batched_tokens=39)
        assert config_of(speculative_config=NGRAM, max_num_seqs=10, max_num_batched_tokens=40)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"num_speculative_tokens": 3}, "needs method, which is ngram, suffix or draft_model"),
            (
                {"method": "eagle", "num_speculative_tokens": 3},
                "must be one of ngram, suffix, draft_model (got 'eagle')",
            ),
            ({"method": "ngram"}, "the method ngram needs num_speculative_tokens, from 1 to 32"),
            ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 32, not 0"),
            ({**NGRAM, "num_speculative_tokens": 33}, "num_speculative_tokens must be from 1 to 32, not 33"),
            ({**NGRAM, "num_speculative_tokens": "3"}, "num_speculative_tokens must be an integer (got '3')"),
            ({**NGRAM, "num_spec_tokens": 3}, "unknown key 'num_spec_tokens'; did you mean num_speculative_tokens"),
            ({**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "at most prompt_lookup_max, not 5 and 4"),
            ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min must be from 1 to 64, not 0"),
            ({**NGRAM, "model": "x"}, "model is for the method draft_model, not for ngram"),
            ({**NGRAM, "suffix_decoding_max_tree_depth": 4}, "is for the method suffix, not for ngram"),
            ({**NGRAM, "acceptance": "rejection"}, "acceptance rejection needs the method draft_model"),
            ({**NGRAM, "acceptance": "typical"}, "acceptance must be one of shared_noise, rejection (got 'typical')"),
            ({"method": "draft_model", "num_speculative_tokens": 3}, "needs model, the draft model's folder"),
            ({"model": "nowhere", "num_speculative_tokens": 3}, "nowhere does not exist"),
            ("ngram", "--speculative-config must be a JSON object, not 'ngram'"),
            ("[1]", "speculative_config must be an object (got [1])"),
        ],
        ids=lambda value: repr(value)[:40],
    )
    def test_invalid_values_are_refused(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            config_of(speculative_config=given)
        assert message in str(caught.value)

    def test_a_draft_model_must_have_the_same_vocabulary(self) -> None:
        folder = DEMO_MODEL
        given = {"model": str(folder), "num_speculative_tokens": 2, "acceptance": "rejection"}
        config = make_engine_config(parse_options({"speculative_config": given}, "LLM"), folder=folder)
        assert config.speculative is not None
        assert config.speculative.method == "draft_model"
        assert config.speculative.model == config.model
        assert config.speculative.model_path == str(folder)
        with pytest.raises(
            ConfigError, match=f"of {config.model.vocab_size} tokens, the model one of {MODEL.vocab_size}"
        ):
            config_of(speculative_config=given)

    def test_a_draft_model_must_have_a_head_for_tokens(self, tmp_path: Path) -> None:
        raw = json.loads((DEMO_MODEL / "config.json").read_text())
        name = raw["architectures"][0].replace("ForCausalLM", "Model")
        (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [name]}))
        given = {"model": str(tmp_path), "num_speculative_tokens": 2}
        with pytest.raises(ConfigError, match="the draft model has no head for tokens"):
            make_engine_config(parse_options({"speculative_config": given}, "LLM"), folder=DEMO_MODEL)

    def test_flag_and_config_file_are_equivalent(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("speculative-config: {method: ngram, num_speculative_tokens: 99}\n")
        for words in (
            ["--config", str(file)],
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 99}'],
        ):
            with pytest.raises(SystemExit) as caught:
                main(["generate", "--prompt", "x", *words])
            assert caught.value.code == 78
            assert "num_speculative_tokens must be from 1 to 32, not 99" in capsys.readouterr().err


class TestProcessors:
    def test_classes_are_converted_to_names(self) -> None:
        config = config_of(logits_processors=[AdapterLogitsProcessor, "json:JSONDecoder"])
        assert config.logits_processors == [
            "quire.protocol.request.logits_processors:AdapterLogitsProcessor",
            "json:JSONDecoder",
        ]
        assert config_of().logits_processors == []

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("json", "must be module:Class, not 'json'"),
            (":Class", "must be module:Class, not ':Class'"),
            ("no_such_module:Class", "module no_such_module not found; the current directory .* PYTHONPATH"),
            (LogitsProcessor.apply, "must hold classes or module:Class"),
        ],
    )
    def test_invalid_values_are_refused(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            config_of(logits_processors=[given])

    def test_a_class_that_is_not_importable_is_refused(self) -> None:
        class Local(AdapterLogitsProcessor):
            pass

        with pytest.raises(ConfigError, match="Local must be importable by the engine's processes"):
            processor_name(Local)
        Local.__module__, Local.__qualname__ = "__main__", "Local"
        with pytest.raises(ConfigError, match="must be importable"):
            processor_name(Local)

    def test_children_get_the_import_paths_of_this_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "my_own_plugin.py").write_text("x = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "a_package").mkdir()
        (tmp_path / "a_package" / "__init__.py").touch()
        (tmp_path / "spaced").mkdir()
        for name in ("my_own_plugin:Class", "a_package.inner:Other", "spaced.inner:Class"):
            assert import_paths([name, "nowhere_at_all:Class", name]) == [str(tmp_path)]
        # Children search the folders of installed packages and of Python itself in any case.
        assert import_paths(["numpy:ndarray", "json:JSONDecoder", "sys:x", "__main__:Class"]) == []
        paths = [str(tmp_path)]
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        assert python_path(paths) == {"PYTHONPATH": f"/somewhere:{tmp_path}"}
        assert python_path([]) == {}
        monkeypatch.delenv("PYTHONPATH")
        assert python_path(paths) == {"PYTHONPATH": str(tmp_path)}

    def test_the_flag_may_be_repeated(self, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--logits-processors", "json:A", "json:B", "--logits-processors", "no_such_module:C"]
        with pytest.raises(SystemExit):
            main(["generate", "--prompt", "x", *flags])
        assert "no_such_module" in capsys.readouterr().err


class TestThinkingMarkers:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        made = Tokenizer(models.BPE({"<": 0, "t": 1, ">": 2, "b": 3, " ": 4}, [], byte_fallback=False))
        made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        made.add_tokens([AddedToken("<think>", special=False)])
        made.add_special_tokens([AddedToken("</think>", special=True)])
        made.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def test_default_markers_are_the_tokenizers(self, folder: Path) -> None:
        assert thinking_markers(folder, None, None, 64) == ([5], [6])
        assert thinking_markers(folder, "", "", 64) == ([], [])
        # Ids outside the model's vocabulary do not count.
        assert thinking_markers(folder, None, None, 6) == ([], [])
        assert thinking_markers(folder, "<t>", "b</think>", 64) == ([0, 1, 2], [3, 6]), "texts of any tokens"

    def test_no_markers_without_a_tokenizer(self, tmp_path: Path) -> None:
        assert thinking_markers(tmp_path, None, None, 64) == thinking_markers(None, None, None, 64) == ([], [])
        with pytest.raises(ConfigError, match="needs a tokenizer"):
            thinking_markers(tmp_path, "a", "b", 64)

    @pytest.mark.parametrize(
        ("start", "end", "vocab_size", "message"),
        [
            *[(start, end, 64, "must be given together") for start, end in (("<t>", None), (None, "<t>"), ("<t>", ""))],
            ("", "<t>", 64, "must be given together"),
            ("<t>", "t" * 65, 64, "--reasoning-end-str must be 1 to 64"),
            ("<think>", "b", 5, "--reasoning-start-str must be 1 to 64"),
        ],
    )
    def test_refusals(self, folder: Path, start: str | None, end: str | None, vocab_size: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            thinking_markers(folder, start, end, vocab_size)

    def test_markers_reach_the_engine(self) -> None:
        folder = DEMO_MODEL
        config = make_engine_config(EngineOptions(), folder=folder)
        assert (config.thinking_start_token_ids, config.thinking_end_token_ids) == ([], [])
        config = make_engine_config(EngineOptions(reasoning_start_str="a", reasoning_end_str="b"), folder=folder)
        assert (len(config.thinking_start_token_ids), len(config.thinking_end_token_ids)) == (1, 1)


class TestOtherFlags:
    def test_terminal_structured_output_modes(self) -> None:
        assert config_of(logprobs_mode="processed_logprobs").logprobs_mode == "processed_logprobs"
        assert config_of().logprobs_mode == EngineConfig(model=MODEL, model_path="", max_model_len=8).logprobs_mode
        with pytest.raises(ConfigError, match="logprobs_mode"):
            config_of(logprobs_mode="raw_logits")

    def test_a_missing_grammar_library_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="needs the package xgrammar: pip install 'quire-serve\\[xgrammar\\]'"):
            config_of(structured_outputs_backend="xgrammar")

    def test_experts_are_kept_only_where_they_can_be(self) -> None:
        moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=8, layers=[0])

        def kept(windows: list[int], chunks: list[int] | None = None, **options: Any) -> EngineConfig:
            model = msgspec.structs.replace(MODEL, moe=moe, windows=windows, chunks=chunks or [])
            return make_engine_config(parse_options({"enable_return_routed_experts": True, **options}, "LLM"), model)

        assert not config_of().enable_return_routed_experts
        assert kept([0, 8]).enable_return_routed_experts and kept([]).enable_return_routed_experts
        with pytest.raises(ConfigError, match="enable-return-routed-experts needs a model with experts, and Llama"):
            config_of(enable_return_routed_experts=True)
        for none_keeps_all in ([8, 8], []), ([8, 0], [0, 64]), ([], [64, 64]):
            with pytest.raises(ConfigError, match="needs a layer without a sliding window or chunks"):
                kept(*none_keeps_all)
        for given in ({"cpu_offload_bytes": 2**20}, {"ssd_cache_dir": "x", "ssd_cache_bytes": 2**20}):
            with pytest.raises(ConfigError, match="blocks that leave the pool would lose their experts"):
                kept([0, 8], **given)

    def test_a_schema_is_read_from_a_file(self, tmp_path: Path) -> None:
        def sampling(*words: str) -> Any:
            return _sampling(parse(["generate", "--prompt", "x", *words]))

        file = tmp_path / "schema.json"
        file.write_text('{"type": "object"}')
        assert sampling("--json-schema", str(file)).structured_outputs.json == '{"type": "object"}'
        params = sampling("--regex", "a+", "--thinking-token-budget", "7")
        assert (params.structured_outputs.regex, params.thinking_token_budget) == ("a+", 7)
        with pytest.raises(ConfigError, match="cannot be combined"):
            sampling("--regex", "a+", "--json-schema", str(file))
        file.write_text("{")
        with pytest.raises(ConfigError, match="cannot be read as a JSON schema"):
            sampling("--json-schema", str(file))


def test_the_public_names() -> None:
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    assert quire.StructuredOutputsParams is quire.StructuredOutputs
    assert quire.LogitsProcessor is LogitsProcessor
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = quire.Nothing
    assert "quire.launch" in sys.modules
