"""Metrics of several front ends, their survival, and the times of a request."""

import asyncio
import os
import re
import threading
import time
from pathlib import Path

import pytest
from exported_metrics import FullEngine
from front_end import EndlessEngine

from quire.frontend.engine.answers import OutputDelta
from quire.frontend.http.serving.metrics import HISTOGRAMS, Metrics, MetricsOptions, SequenceClock
from quire.protocol.process.restarts import Restarts, write_pids, write_restarts
from quire.protocol.process.router_figures import RouterFigures, write_router_figures
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.routing import EnginePlace
from quire.protocol.wire.front_end_messages import Histogram, ProgramCounts, Statistics


def scrape(metrics: Metrics, engine: EndlessEngine | None = None) -> dict[str, float]:
    """Return value by name and labels of one scrape, without the label of the model."""
    page = asyncio.run(metrics.render(engine or EndlessEngine())).decode()
    found = re.findall(r"^(\w+:\w+)\{(.*)\} ([\d.e+-]+)$", page, re.M)
    values = {}
    for name, labels, value in found:
        kept = [label for label in labels.split(",") if not label.startswith("model_name=")]
        values[name + (f"{{{','.join(kept)}}}" if kept else "")] = float(value)
    return values


def front_end(directory: Path, index: int) -> Metrics:
    return Metrics("tiny", MetricsOptions(directory=directory, index=index), lambda: 103.5)


def end_one(metrics: Metrics) -> None:
    clock = SequenceClock(metrics, 100.0, num_prompt_tokens=7)
    clock.record(OutputDelta("", [], None, "length", None, 6, 0, "", admitted=101.0))


def test_every_front_end_answers_with_the_sums(tmp_path: Path) -> None:
    first, second = front_end(tmp_path, 0), front_end(tmp_path, 1)
    for metrics in (first, first, second):
        end_one(metrics)
    second.rejected("queue_full")
    second.rejected("a code of a later version")
    first.cut_slow_reader()
    for metrics in (first, second):
        found = scrape(metrics)
        assert found['quire:request_success_total{finished_reason="length"}'] == 3
        assert found["quire:request_generation_tokens_sum"] == 18
        assert found["quire:e2e_request_latency_seconds_count"] == 3
        assert found['quire:admission_rejections_total{reason="queue_full"}'] == 1
        assert found['quire:admission_rejections_total{reason="other"}'] == 1
        assert found["quire:slow_readers_total"] == 1


def test_counters_survive_a_front_end(tmp_path: Path) -> None:
    survivor, dead = front_end(tmp_path, 0), front_end(tmp_path, 1)
    end_one(survivor)
    end_one(dead)
    del dead
    name = "quire:request_generation_tokens_sum"
    assert scrape(survivor)[name] == 12
    successor = front_end(tmp_path, 1)
    end_one(successor)
    assert scrape(survivor)[name] == scrape(successor)[name] == 18
    (tmp_path / "metrics-2").touch()  # a front end that is starting
    assert scrape(survivor)[name] == 18


def test_concurrent_scrapes_never_fall(tmp_path: Path) -> None:
    writer, reader = front_end(tmp_path, 0), front_end(tmp_path, 1)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            end_one(writer)

    thread = threading.Thread(target=write)
    thread.start()
    before: dict[str, float] = {}
    for _ in range(15):
        found = {name: value for name, value in scrape(reader).items() if name.startswith("quire:request_")}
        assert all(found[name] >= value for name, value in before.items())
        before = found
    done.set()
    thread.join()


def test_shared_values_need_room(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        front_end(tmp_path / "missing", 0)


def test_restarts_of_processes_are_those_of_the_supervisor(tmp_path: Path) -> None:
    metrics = front_end(tmp_path, 0)
    assert scrape(metrics)["quire:num_scheduler_restarts_total"] == 0
    write_restarts(tmp_path, Restarts(scheduler=1, worker=2, frontend=3))
    found = scrape(metrics)
    roles = ("scheduler", "worker", "front_end")
    assert [found[f"quire:num_{role}_restarts_total"] for role in roles] == [1, 2, 3]


def test_parts_of_a_request_add_up() -> None:
    times = [101.0, 101.5, 103.5, 103.5]
    metrics = Metrics("tiny", now=lambda: times.pop(0))
    metrics.began(SamplingParams(n=1, max_tokens=6))
    metrics.began(SamplingParams(n=2, max_tokens=None))
    clock = SequenceClock(metrics, 100.0, num_prompt_tokens=7)
    for num_tokens, reason in ((1, None), (2, None), (6, "length")):
        clock.record(OutputDelta("", [], None, reason, None, num_tokens, 3, "", admitted=100.25))
    found = scrape(metrics)
    assert {name: found[f"quire:{name}_sum"] for name, _, _ in HISTOGRAMS} == {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 1.0,
        "e2e_request_latency_seconds": 3.5,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.75,
        "request_decode_time_seconds": 2.5,
        "request_inference_time_seconds": 3.25,
        "request_time_per_output_token_seconds": 0.5,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 6,
        "request_prefill_kv_computed_tokens": 4,
        "request_params_n": 3,
        "request_params_max_tokens": 6,
    }
    assert found['quire:request_queue_time_seconds_bucket{le="0.25"}'] == 1
    assert found['quire:request_queue_time_seconds_bucket{le="0.1"}'] == 0


@pytest.mark.parametrize("admitted", [0.0, 99.0, 10**6])
def test_an_impossible_admission_time_makes_no_negative_part(admitted: float) -> None:
    metrics = Metrics("tiny", now=lambda: 103.5)
    clock = SequenceClock(metrics, 100.0, num_prompt_tokens=7)
    clock.record(OutputDelta("", [], None, "stop", None, 1, 0, "", admitted=admitted))
    found = scrape(metrics)
    assert found["quire:request_queue_time_seconds_sum"] + found["quire:request_prefill_time_seconds_sum"] == 3.5
    assert min(found.values()) >= 0


def test_aborted_sequence_is_counted_without_times() -> None:
    metrics = Metrics("tiny", now=lambda: 1.0)
    SequenceClock(metrics, 0.0, 3).end("abort")
    found = scrape(metrics)
    assert found['quire:request_success_total{finished_reason="abort"}'] == 1
    assert found["quire:e2e_request_latency_seconds_count"] == 0


class Engine(EndlessEngine):
    async def statistics(self) -> Statistics:
        pool = {"num_usable_blocks": 100, "num_free_blocks": 50, "block_size": 16}
        return Statistics(1, **pool, step_tokens=Histogram([1.0, 2.0], [3, 1, 1], 9))


def test_vllm_prefix_and_names() -> None:
    cache = {"cache_dtype": "bfloat16"}
    found = scrape(Metrics("tiny", MetricsOptions("vllm", cache_config=cache)), Engine())
    assert not [name for name in found if not name.startswith("vllm:")]
    assert found["vllm:iteration_tokens_total_sum"] == 9 and found["vllm:iteration_tokens_total_count"] == 5
    assert found['vllm:iteration_tokens_total_bucket{le="2.0"}'] == 4
    assert found["vllm:prompt_tokens_cached_total"] == 0
    info = 'vllm:cache_config_info{block_size="16",cache_dtype="bfloat16",engine="0",num_gpu_blocks="100"}'
    assert found[info] == 1


def test_turns_are_counted_by_how_their_program_was_found() -> None:
    class WithPrograms(EndlessEngine):
        async def statistics(self) -> Statistics:
            counts = ProgramCounts(7, {"job_id": 5, "prefix": 3}, 80, 60, 2, 1, {"idle": 4})
            return Statistics(1, num_usable_blocks=1, programs=counts)

    found = scrape(Metrics("tiny", MetricsOptions()), WithPrograms())
    assert found["quire:num_programs"] == 7
    assert [found[f'quire:num_turns_total{{found_by="{by}"}}'] for by in ("job_id", "prefix")] == [5, 3]
    assert (found["quire:num_programs_admitted"], found["quire:num_programs_waiting"]) == (2, 1)
    assert found['quire:num_programs_released_total{reason="idle"}'] == 4
    assert found["quire:later_turn_hit_tokens_total"] == 60
    assert not [name for name in scrape(Metrics("tiny", MetricsOptions()), Engine()) if "num_programs" in name]


def process_figures(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the figures of processes by name and role."""
    page = asyncio.run(metrics.render(EndlessEngine())).decode()
    found = re.findall(r'^(process_\w+)\{model_name="tiny",process="(\w+)"\} ([\d.e+-]+)$', page, re.M)
    return {(name, role): float(value) for name, role, value in found}


def test_processes_are_measured_by_role(tmp_path: Path) -> None:
    metrics = front_end(tmp_path, 0)
    assert {role for _, role in process_figures(metrics)} == {"frontend"}, "until the supervisor has written the ids"
    own = os.getpid()
    write_pids(tmp_path, {"scheduler": [own], "worker": [own, own], "standby": [2**22 + 1]})
    found = process_figures(metrics)
    assert {role for _, role in found} == {"scheduler", "worker"}, "a process that has ended is left out"
    assert found["process_resident_memory_bytes", "worker"] > 1.5 * found["process_resident_memory_bytes", "scheduler"]
    assert found["process_open_fds", "scheduler"] >= 3
    assert 0 < found["process_cpu_seconds_total", "scheduler"] <= time.process_time() + 0.1
    start = found["process_start_time_seconds", "worker"]
    assert start == found["process_start_time_seconds", "scheduler"] <= time.time()


def test_pins() -> None:
    found = scrape(Metrics("tiny"), FullEngine())
    assert (found["quire:num_pins"], found["quire:num_pinned_blocks"]) == (2, 9)
    assert found['quire:num_pins_ended_total{reason="return"}'] == 3 and found['quire:pin_seconds{tool="none"}'] == 2.0
    assert found["quire:num_pin_failures_total"] == 0


def test_adapters(tmp_path: Path) -> None:
    """The requests of one name are summed: it may stand for an old and a new content."""
    found = scrape(Metrics("tiny", MetricsOptions(max_loras=8)), FullEngine())
    assert found['quire:num_requests_running_by_adapter{adapter="sql"}'] == 3
    assert found['quire:num_requests_waiting_by_adapter{adapter="sql"}'] == 1
    assert found['quire:num_requests_waiting_by_adapter{adapter="chat"}'] == 4
    assert found['quire:num_adapters{place="host"}'] == 1
    assert (found["quire:num_adapter_loads_total"], found["quire:adapter_load_seconds_total"]) == (5, 0.5)
    page = asyncio.run(Metrics("tiny", MetricsOptions(max_loras=8)).render(FullEngine())).decode()
    info = next(line for line in page.splitlines() if line.startswith("quire:lora_requests_info{"))
    assert 'max_lora="8"' in info
    assert 'running_lora_adapters="sql"' in info
    assert 'waiting_lora_adapters="sql,chat"' in info
    assert not any("num_adapter" in name for name in scrape(Metrics("tiny")))


def test_the_encoder_cache() -> None:
    found = scrape(Metrics("tiny"), FullEngine())
    assert (found["quire:encoder_cache_size_tokens"], found["quire:num_encoder_runs_total"]) == (64, 3)
    assert found["quire:encoder_seconds_total"] == 0.25
    assert not any("encoder" in name and "reason" not in name for name in scrape(Metrics("tiny")))


def test_evictions_by_policy() -> None:
    found = scrape(Metrics("tiny"), FullEngine())
    assert found['quire:num_evicted_blocks_by_policy_total{policy="pinned"}'] == 4


class TwoEngines(EndlessEngine):
    """Two engines of three answer."""

    async def statistics_by_engine(self) -> dict[int, Statistics]:
        times = Histogram([1.0], [1, 0], 0.5)
        pool = {"num_usable_blocks": 8, "num_free_blocks": 2, "block_size": 16}
        return {n: Statistics(1, num_running=n + 1, step_tokens=times, **pool) for n in (0, 2)}


def test_each_engine_has_its_own_label(tmp_path: Path) -> None:
    engine = TwoEngines(places=[EnginePlace(n, state=s) for n, s in enumerate(("serving", "failed", "serving"))])
    choices = [(0, "cached", 5), (2, "load", 1)]
    write_router_figures(tmp_path, RouterFigures(policy="cache", choices=choices, indexed_blocks={0: 9, 2: 1}))
    write_restarts(tmp_path, Restarts(engine=3, router=1))
    options = MetricsOptions(directory=tmp_path, cache_config={"cache_dtype": "bfloat16"})
    metrics = Metrics("tiny", options)
    found = scrape(metrics, engine)
    running = "quire:num_requests_running"
    assert (found[f'{running}{{engine="0"}}'], found[f'{running}{{engine="2"}}']) == (1, 3)
    assert found['quire:iteration_tokens_total_count{engine="2"}'] == 1
    assert found['quire:num_engines{state="serving"}'] == 2 and found['quire:num_engines{state="failed"}'] == 1
    assert (found["quire:num_engine_restarts_total"], found["quire:num_router_restarts_total"]) == (3, 1)
    assert found['quire:router_choices_total{engine="0",policy="cache",reason="cached"}'] == 5
    assert found['quire:router_indexed_blocks{engine="0"}'] == 9
    info = [name for name in found if name.startswith("quire:cache_config_info")]
    assert len(info) == 2 and 'engine="2"' in info[1]
    page = asyncio.run(metrics.render(engine)).decode()
    helps = [line for line in page.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)), "one HELP line per family"


def test_one_engine_has_no_label_and_no_router() -> None:
    found = scrape(Metrics("tiny"), Engine())
    assert "quire:num_requests_running" in found
    assert not [name for name in found if "router" in name or "num_engines" in name]
