"""Scheduling settings, from the user's flags to the scheduler's configuration."""

import pytest
from configs import MODEL, config_of

from quire.launch.cli import main
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError


def test_settings_reach_the_scheduler() -> None:
    given = {
        "scheduling_policy": "priority",
        "max_num_queued_reqs": 7,
        "max_prefill_share": 0.25,
        "reserve_full_sequence": True,
        "watermark": 0.02,
        "prefix_caching_hash_algo": "xxh3_128",
    }
    config = config_of(**given)
    assert {name: getattr(config, name) for name in given} == given


def test_defaults_equal_those_of_the_engine_configuration() -> None:
    config, bare = config_of(), EngineConfig(model=MODEL, model_path="", max_model_len=8)
    for name in ("scheduling_policy", "max_num_queued_reqs", "max_prefill_share", "reserve_full_sequence"):
        assert getattr(config, name) == getattr(bare, name), name
    assert (config.watermark, config.prefix_caching_hash_algo) == (bare.watermark, bare.prefix_caching_hash_algo)


def test_continuum_keeps_cached_blocks_so_it_needs_some() -> None:
    with pytest.raises(ConfigError, match="--scheduling-policy continuum needs --enable-prefix-caching"):
        config_of(scheduling_policy="continuum", enable_prefix_caching=False)


def test_a_config_file_allows_dashes_and_integers() -> None:
    assert config_of(**{"max-prefill-share": 1, "watermark": 0}).max_prefill_share == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule-policy", "lpm"], "did you mean --scheduling-policy"),
        (["--max-queued-requests", "4"], "did you mean --max-num-queued-reqs"),
        (["--scheduler-reserve-full-isl"], "did you mean --reserve-full-sequence"),
        (["--scheduling-policy", "lpm"], "invalid choice: 'lpm'"),
        (["--prefix-caching-hash-algo", "md5"], "invalid choice: 'md5'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words[0] in error and message in error, error


def test_a_number_of_programs_needs_the_policy_for_programs() -> None:
    assert config_of(scheduling_policy="program", max_programs=3).max_programs == 3
    with pytest.raises(ConfigError, match="--max-programs 3 needs --scheduling-policy program"):
        config_of(max_programs=3)


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 does not divide this model; possible: 1, 2"):
        config_of(tensor_parallel_size=3)


def test_an_unknown_policy_is_refused_as_a_keyword() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduling_policy must be one of fcfs, priority, program, continuum \(got 'lpm'\)"
    ):
        config_of(scheduling_policy="lpm")


class TestHashAlgorithm:
    @pytest.mark.parametrize("word", ["xxhash", "xxh3_128"])
    def test_aliases_of_a_flag(self, word: str) -> None:
        assert config_of(prefix_caching_hash_algo=word).prefix_caching_hash_algo == "xxh3_128"
        assert config_of().prefix_caching_hash_algo == "sha256"


@pytest.mark.parametrize(
    ("given", "least", "is_chunked"), [(9, 10, True), (101, 10, True), (40, 64, False), (-1, 10, True)]
)
def test_scheduled_tokens_are_at_most_what_the_workers_have_room_for(given: int, least: int, is_chunked: bool) -> None:
    sizes = {"max_num_seqs": 10, "max_num_batched_tokens": 100, "max_model_len": 64}
    sizes |= {"enable_chunked_prefill": is_chunked}
    assert config_of(**sizes).step_tokens == 100 and config_of(**sizes, max_num_scheduled_tokens=80).step_tokens == 80
    with pytest.raises(ConfigError, match=f"--max-num-scheduled-tokens must be from {least} to 100, not {given}$"):
        config_of(**sizes, max_num_scheduled_tokens=given)
