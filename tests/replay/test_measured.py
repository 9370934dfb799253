"""Measured runs as traces: their settings, their own machine, and replayed figures beside the measured ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from made_up_profile import write_profile

from quire.launch.cli import main
from quire.protocol.errors import ConfigError
from quire.replay.formats.detect import detect_format, load_workload
from quire.replay.formats.measured_results import measured_record
from quire.replay.formats.options import LoadOptions
from quire.replay.simulate.whatif import prepare

KWARGS = {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 8}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Six requests and a made-up profile."""
    folder = tmp_path
    write_profile(folder)
    meta: dict[str, Any] = {"model": "Qwen/Qwen3-30B-A3B-Instruct-2507", "vllm_version": "0.19.0"}
    meta |= {"engine_kwargs": KWARGS | {"max_model_len": None, "seed": 42, "max_num_batched_tokens": 64}}
    meta |= {"kv_cache": {"num_gpu_blocks": 101, "block_size": 4}}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2))
    calls = [{"input_tok_ids": [1, 2, 3, 4, n], "output_toks": 3, "arrival_time_ns": n * 1e6} for n in range(6)]
    with gzip.open(folder / "workload.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in calls)
    results = [
        {
            "request_id": f"bench-{n}",
            "input_toks": 5,
            "output_toks": 3,
            "arrival_time": 1e9 + n,
            "queued_ts": 50.0 + n,
            "scheduled_ts": 50.25 + n,
            "first_token_ts": 50.5 + n,
            "last_token_ts": 52.5 + n,
        }
        for n in range(6)
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    return folder


def test_a_run_has_its_settings_and_its_machine(measured: Path) -> None:
    assert detect_format(measured) == "measured"
    workload = load_workload(measured, "auto", LoadOptions())
    assert [(c.arrival, c.num_prompt_tokens, c.num_output_tokens) for c in workload.calls][1] == (0.001, 5, 3)
    assert len({tuple(call.content.ids) for call in workload.calls if call.content}) == 1, "they share a block of four"
    setup, cost = prepare(workload, {}, None)
    assert "experts over 2 ranks" in cost.describe() and str(measured) in cost.describe()
    assert (setup.num_engines, setup.routing, setup.num_usable_blocks) == (2, "vllm", 100)
    assert setup.config.max_num_seqs == 8 and setup.config.max_prefill_share == 1.0
    setup, _ = prepare(workload, {"like": "quire", "num_usable_blocks": "50", "data_parallel_size": "3"}, None)
    assert (setup.num_engines, setup.routing, setup.num_usable_blocks) == (3, "cache", 50)


def test_measured_figures_are_shown_beside_the_replayed_ones(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["replay", str(measured), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["latency_ms"]["ttft"]["mean"] == 500.0
    assert found["measured"]["latency_ms"]["tpot"]["mean"] == 1000.0
    assert found["requests"] == 6 and found["engines"]["choices"] == {"load": 6}
    main(["replay", str(measured)])
    assert "latency, mean" in (out := capsys.readouterr().out) and "measured  replayed" in out
    main(["replay", str(measured), "--limit", "3"])
    assert "measured  replayed" not in capsys.readouterr().out, "the measured figures are of other requests"


def test_a_setting_of_another_type_is_refused(measured: Path) -> None:
    meta = json.loads((measured / "meta.json").read_text())
    (measured / "meta.json").write_text(json.dumps(meta | {"engine_kwargs": KWARGS | {"data_parallel_size": "2"}}))
    with pytest.raises(ConfigError, match=r"meta\.json: Expected `int \| null`, got `str` - at `\$\.engine_kwargs"):
        load_workload(measured, "auto", LoadOptions())


def test_steps_of_several_engines_are_not_one_track(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(measured), "--perfetto", str(measured / "steps.json")])
    assert ended.value.code == 2 and "it needs data_parallel_size=1 (got 2)" in capsys.readouterr().err
    one = ["--set", "data_parallel_size=1", "--set", "enable_expert_parallel=false"]
    main(["replay", str(measured), "--perfetto", str(measured / "steps.json"), *one])


def test_a_run_without_its_profile_is_refused(measured: Path) -> None:
    for path in measured.glob("profile_*"):
        path.unlink()
    with pytest.raises(ConfigError, match="no layer profile of the measured machine"):
        prepare(load_workload(measured, "auto", LoadOptions()), {"enable_expert_parallel": "false"}, None)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("meta.json", "{}", "meta.json: Object missing required field `model`"),
        ("meta.json", "{", "meta.json: Input data was truncated"),
        ("workload.jsonl", "[]\n", "workload.jsonl:1: "),
        ("workload.jsonl", '{"input_tok_ids": [-1], "output_toks": 1, "arrival_time_ns": 0}\n', "between 0 and 2"),
    ],
)
def test_bad_files_are_named(measured: Path, name: str, text: str, reason: str) -> None:
    for path in measured.glob(f"{name}*"):
        path.unlink()
    (measured / name).write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_workload(measured, "auto", LoadOptions())


def test_bad_results_are_named(measured: Path) -> None:
    (measured / "requests.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"requests.jsonl:1: .*request_id"):
        measured_record(measured)
    (measured / "requests.jsonl").unlink()
    assert measured_record(measured) is None
    (measured / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"meta.json not found"):
        load_workload(measured, "measured", LoadOptions())
