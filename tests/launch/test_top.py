"""``quire top``: its screen and its JSON, from recorded metrics and from a real front end; one-line errors."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exported_metrics import FullEngine, exported_labels
from front_end import FrontEnd
from hypothesis import example, given
from hypothesis import strategies as st

from quire.launch import cli
from quire.launch.top import overview as overview_module
from quire.launch.top.overview import Figures, overview
from quire.launch.top.scrape import Distribution, Scrape
from quire.launch.top.screen import screen
from quire.launch.top.state import AdminState, decode_state
from quire.launch.top.watch import ServerMetrics, Watch
from quire.protocol.errors import EngineError

BEFORE = """\
# TYPE quire:prompt_tokens counter
quire:prompt_tokens_total{model_name="m"} 1000
quire:prompt_tokens_cached_total{model_name="m"} 100
quire:generation_tokens_total{model_name="m"} 5000
quire:prefix_cache_queries_total{model_name="m"} 1000
quire:prefix_cache_hits_total{model_name="m"} 100
quire:num_preemptions_total{model_name="m"} 9
quire:request_success_total{finished_reason="stop",model_name="m"} 10
quire:request_success_total{finished_reason="length",model_name="m"} 2
# TYPE quire:request_queue_time_seconds histogram
quire:request_queue_time_seconds_bucket{le="0.1",model_name="m"} 10
quire:request_queue_time_seconds_bucket{le="1.0",model_name="m"} 10
quire:request_queue_time_seconds_bucket{le="+Inf",model_name="m"} 10
quire:request_queue_time_seconds_count{model_name="m"} 10
quire:request_queue_time_seconds_sum{model_name="m"} 0.5
"""
AFTER = """\
# TYPE quire:prompt_tokens counter
quire:prompt_tokens_total{model_name="m"} 3000
quire:prompt_tokens_cached_total{model_name="m"} 1100
quire:generation_tokens_total{model_name="m"} 5500
quire:prefix_cache_queries_total{model_name="m"} 3000
quire:prefix_cache_hits_total{model_name="m"} 1100
quire:num_preemptions_total{model_name="m"} 4
quire:num_preemptions_by_reason_total{model_name="m",reason="no_kv_blocks"} 4
quire:request_success_total{finished_reason="stop",model_name="m"} 18
quire:request_success_total{finished_reason="length",model_name="m"} 2
quire:num_requests_running{model_name="m"} 12
quire:num_requests_waiting{model_name="m"} 34
quire:num_requests_waiting_by_reason{model_name="m",reason="queued"} 4
quire:num_requests_waiting_by_reason{model_name="m",reason="kv_blocks"} 30
quire:num_requests_waiting_by_reason{model_name="m",reason="grammar"} 0
quire:kv_cache_usage_perc{model_name="m"} 0.75
quire:num_usable_blocks{model_name="m"} 4096
quire:num_cached_blocks{model_name="m"} 1200
quire:cache_config_info{block_size="16",model_name="m"} 1
quire:num_worker_restarts_total{model_name="m"} 1
quire:num_scheduler_restarts_total{model_name="m"} 0
quire:num_front_end_restarts_total{model_name="m"} 0
# TYPE quire:request_queue_time_seconds histogram
quire:request_queue_time_seconds_bucket{le="0.1",model_name="m"} 11
quire:request_queue_time_seconds_bucket{le="1.0",model_name="m"} 14
quire:request_queue_time_seconds_bucket{le="+Inf",model_name="m"} 14
quire:request_queue_time_seconds_count{model_name="m"} 14
quire:request_queue_time_seconds_sum{model_name="m"} 2.5
# TYPE quire:step_schedule_time_seconds histogram
quire:step_schedule_time_seconds_bucket{le="0.001",model_name="m"} 100
quire:step_schedule_time_seconds_bucket{le="+Inf",model_name="m"} 100
quire:step_schedule_time_seconds_count{model_name="m"} 100
quire:step_schedule_time_seconds_sum{model_name="m"} 0.02
quire:step_worker_time_seconds_count{model_name="m"} 100
quire:step_worker_time_seconds_sum{model_name="m"} 0.18
"""
STATE = """{"state": "ready", "paused": "wait", "step_parts": {},
 "tenants": [{"tenant": 1, "running": 3, "waiting": 3, "kv_blocks": 72},
             {"tenant": 2, "running": 9, "waiting": 31, "kv_blocks": 3000}],
 "requests": [{"id": "chatcmpl-5d2c-0", "tenant": 1, "state": "running", "reason": null, "seconds": 12.5,
               "prompt_tokens": 40, "output_tokens": 1200, "kv_blocks": 78, "preemptions": 0},
              {"id": "cmpl-7-1", "tenant": 2, "state": "waiting", "reason": "kv_blocks", "seconds": 3.0,
               "prompt_tokens": 9000, "output_tokens": 0, "kv_blocks": 0, "preemptions": 2, "adapter": "sql"}]}"""
SCREEN = """\
quire top  http://h:8000  m  ready  (last 2.0 s)

requests        running 12   waiting 34   ended 4.0/s   refused -/s
waiting for     kv_blocks 30, queued 4
tokens/s        generated 250   prompt 1,000, of these cached 500   per step -
KV blocks       [##################......]  75% of 4,096 blocks of 16 tokens   cached 1,200   evicted -/s
prefix cache    [############............]  50% of the prompt tokens found
preemptions     2.0/s   since the start 4: no_kv_blocks 4

seconds               mean       p50       p99    number
  queue             0.5000    0.4000    0.6333         4
  prefill                -         -         -         -
  decode                 -         -         -         -
  first token            -         -         -         -
  between tokens         -         -         -         -
  whole request          -         -         -         -

step, ms              mean       p50       p99     share
  schedule            0.20      0.20      0.20       10%
  worker              1.80         -         -       90%
  update                 -         -         -         -
  reply                  -         -         -         -

restarts        workers 1   scheduler 0   front ends 0

tenants            running   waiting KV blocks
  2                      9        31     3,000
  1                      3         3        72

oldest requests     tenant   seconds    prompt    output KV blocks
                         1      12.5        40     1,200        78  running  chatcmpl-5d2c-0
                         2       3.0     9,000         0         0  waiting (kv_blocks), adapter sql  cmpl-7-1"""


def recorded(text: str = AFTER) -> Figures:
    return overview(Scrape.parse(text, 12.0), Scrape.parse(BEFORE, 10.0), "ready")


def test_the_screen_of_recorded_metrics() -> None:
    assert "\n".join(screen(recorded(), "http://h:8000", decode_state(STATE).lines())) == SCREEN
    assert SCREEN.startswith("\n".join(screen(recorded(), "http://h:8000")))


def test_many_tenants_and_requests_are_cut() -> None:
    state = decode_state(STATE)
    lines = AdminState(None, state.tenants * 50, state.requests * 50).lines()  # type: ignore[operator]
    assert "  and 92 more" in lines and len(lines) < 25


def test_any_prefix_is_read() -> None:
    assert recorded(AFTER.replace("quire:", "vllm:")) == recorded()


def test_without_an_earlier_scrape_figures_are_since_the_start() -> None:
    shown = overview(Scrape.parse(AFTER, 12.0), None, "")
    assert shown["window_s"] is None and shown["generation_tokens_per_s"] is None
    assert shown["hit_share"] == 1100 / 3000
    queue = shown["times"]["queue"]
    assert queue is not None and (queue["count"], queue["mean"]) == (14, 2.5 / 14)
    assert "(since the start)" in screen(shown, "u")[0]


def test_a_scrape_without_the_scheduler_is_marked() -> None:
    lines = screen(recorded("quire:num_worker_restarts_total 0\n"), "u")
    assert lines[-1].startswith("the scheduler did not answer")
    assert any("running -   waiting -" in line for line in lines)


def test_control_characters_and_long_names_of_a_server_do_not_reach_the_terminal() -> None:
    lines = screen(recorded(AFTER.replace('"m"', '"\x1b[2J' + "m" * 500 + '"')), "u", width=80)
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert "?[2Jmmm" in lines[0]


@pytest.mark.parametrize("text", ["quire:x{le= 1", 'quire:x_bucket{model_name="m"} 1', "quire:x one"])
def test_damaged_metrics_are_an_error(text: str) -> None:
    with pytest.raises(EngineError, match="not in the Prometheus text format"):
        Scrape.parse(text + "\n", 0.0)


def test_every_metric_that_is_read_exists() -> None:
    source = Path(overview_module.__file__).read_text()
    found = re.findall(r'"([a-z_]+_(?:total|seconds|info|perc|running|waiting|blocks|by_reason))"(?!:)', source)
    named = set(found)
    exported = set(exported_labels("quire"))
    families = exported | {name.removesuffix("_count") for name in exported if name.endswith("_count")}
    assert len(named) > 20
    assert {f"quire:{name}" for name in named} <= families


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    made = FrontEnd(FullEngine())
    yield made
    made.close()


def url(served: FrontEnd) -> str:
    return f"http://127.0.0.1:{served.port}"


def test_once_json_of_a_real_front_end(served: FrontEnd, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["top", "--url", f"{url(served)}/v1", "--once", "--json", "--interval", "0.01"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model"], shown["state"], shown["running"]) == ("endless", "ready", 0)
    assert shown["waiting_by_reason"] == {"kv_blocks": 1} and shown["ended_per_s"] == 0
    assert 0 < shown["window_s"] < 10


@given(st.lists(st.floats(0, 30), min_size=1, max_size=30))
@example([10.03] * 4)
def test_no_percentile_exceeds_the_largest_value(values: list[float]) -> None:
    bounds = [1.0, 5.0, 10.0, 20.0, float("inf")]
    counts = [(bound, float(sum(value <= bound for value in values))) for bound in bounds]
    found = Distribution(len(values), sum(values) / len(values), counts)
    most = max(values) * (1 + 1e-9)
    assert 0 <= (found.quantile(0.5) or 0) <= (found.quantile(0.99) or 0) <= most


def test_once_prints_the_screen(served: FrontEnd, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["top", "--url", url(served), "--once", "--interval", "0"])
    out = capsys.readouterr().out
    assert out.startswith(f"quire top  {url(served)}  endless  ready  (since the start)\n")
    assert "\x1b" not in out and "waiting for     kv_blocks 1\n" in out
    assert re.search(r"whole request +[\d.]+ +[\d.]+ +[\d.]+ +\d+\n", out)  # of the canary request


def test_figures_are_of_the_last_ten_seconds(served: FrontEnd) -> None:
    times = iter(range(0, 1000, 4))
    pauses: list[float] = []
    watch = Watch(ServerMetrics(url(served), None), 4.0, lambda: float(next(times)), pauses.append)
    assert watch.scrape().figures["window_s"] is None
    assert [watch.next().figures["window_s"] for _ in range(5)] == [4, 8, 12, 12, 12]
    assert pauses == [4.0] * 5
    slow = iter(range(0, 1000, 60))
    watch = Watch(ServerMetrics(url(served), None), 60.0, lambda: float(next(slow)), pauses.append)
    assert [watch.next().figures["window_s"] for _ in range(3)] == [60, 60, 60]


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "localhost:8000"], "--url must start with http:// or https:// (got 'localhost:8000')"),
        (["--interval", "0"], "--interval must be between 0.1 and 3600 seconds (got 0)"),
        (["--once", "--interval", "nan"], "--interval must be between 0 and 3600 seconds (got nan)"),
        (["--once", "--url", "http://[::1"], "cannot reach the server"),
        (["--once", "--url", unused_url()], "cannot reach the server: [Errno"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", *words])
    error = capsys.readouterr().err
    assert ended.value.code and message in error and error.count("\n") == 1, error


@pytest.fixture
def administered(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontEnd]:
    monkeypatch.delenv("QUIRE_ADMIN_API_KEY", raising=False)
    made = FrontEnd(FullEngine(), settings={"admin_api_keys": ("admin",)})
    yield made
    made.close()


def test_an_administrators_key_adds_tenants_and_requests(
    administered: FrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: str) -> Any:
        cli.main(["top", "--url", url(administered), "--once", "--json", "--interval", "0", *words])
        return json.loads(capsys.readouterr().out)

    assert shown()["tenants"] is None and shown()["admin_error"] == ""
    assert "returned 401: it is not a key" in shown("--admin-api-key", "other")["admin_error"]
    file = tmp_path / "key"
    file.write_text("admin\n")
    for words in (["--admin-api-key", "admin"], ["--admin-api-key-file", str(file)]):
        found = shown(*words)
        assert [tenant["tenant"] for tenant in found["tenants"]] == [3]
        assert found["requests"][0]["reason"] == "kv_blocks" and found["admin_error"] == ""
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "admin")
    assert shown()["tenants"] == found["tenants"]


def test_a_server_without_administrators_routes_shows_its_metrics(
    served: FrontEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["top", "--url", url(served), "--once", "--interval", "0", "--admin-api-key", "k"])
    out = capsys.readouterr().out
    assert "waiting for     kv_blocks 1\n" in out and "/admin/state returned 404: the server has no such key" in out


def test_another_server_is_an_error(served: FrontEnd, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["top", "--once", "--url", f"{url(served)}/elsewhere"])
    assert "/elsewhere/metrics returned 404: is this a server of Quire?" in capsys.readouterr().err


def test_the_screen_is_redrawn_until_interrupted_and_shows_errors(
    served: FrontEnd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, answers = ServerMetrics.metrics, iter([True, False, True])

    def metrics(server: ServerMetrics) -> str:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if not answer:
            raise EngineError("the server is restarting")
        return real(server)

    monkeypatch.setattr(ServerMetrics, "metrics", metrics)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    cli.main(["top", "--url", url(served)])
    out = capsys.readouterr().out
    assert out.startswith("\x1b[?1049h") and out.endswith("\x1b[?25h\x1b[?1049l")
    screens = out.split("\x1b[H")[1:]
    assert ["the server is restarting" in drawn for drawn in screens] == [False, True, False]
    assert all("quire top  http" in drawn for drawn in screens)


SEVERAL = """\
quire:num_requests_running{engine="0",model_name="m"} 2
quire:num_requests_running{engine="1",model_name="m"} 3
quire:num_requests_waiting{engine="0",model_name="m"} 0
quire:num_requests_waiting{engine="1",model_name="m"} 7
quire:num_usable_blocks{engine="0",model_name="m"} 100
quire:num_usable_blocks{engine="1",model_name="m"} 100
quire:num_free_blocks{engine="0",model_name="m"} 90
quire:num_free_blocks{engine="1",model_name="m"} 40
quire:kv_cache_usage_perc{engine="0",model_name="m"} 0.1
quire:kv_cache_usage_perc{engine="1",model_name="m"} 0.6
quire:generation_tokens_total{engine="0",model_name="m"} 50
quire:generation_tokens_total{engine="1",model_name="m"} GROWN
quire:router_choices_total{engine="1",model_name="m",policy="cache",reason="cached"} 4
quire:router_choices_total{engine="1",model_name="m",policy="cache",reason="load"} 1
quire:num_engine_restarts_total{model_name="m"} 6
quire:num_router_restarts_total{model_name="m"} 2
"""


def test_several_engines_are_sums_and_a_line_each() -> None:
    before, now = (Scrape.parse(SEVERAL.replace("GROWN", text), at) for text, at in (("10", 0.0), ("30", 2.0)))
    shown = overview(now, before, "ready")
    assert (shown["running"], shown["waiting"], shown["kv_use"]) == (5, 7, 0.35)
    assert [each["generation_tokens_per_s"] for each in shown["engines"]] == [0, 10]
    lines = screen(shown, "http://a")
    at = lines.index(next(line for line in lines if line.startswith("engines")))
    assert lines[at + 1].split() == ["0", "2", "0", "10%", "0.0", "0"]
    assert lines[at + 2].split() == ["1", "3", "7", "60%", "10", "5"]
    assert any("engines 6   router 2" in line for line in lines)


@pytest.mark.parametrize(
    ("before", "after"), [((9000, 9000), (9200, 0)), ((9000, 9000), (9200,)), ((9000,), (9200, 7))]
)
def test_an_engine_that_restarts_or_does_not_answer_does_not_change_rates(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    def scrape(counts: tuple[int, ...], time: float) -> Scrape:
        rows = [f'quire:generation_tokens_total{{engine="{at}"}} {count}' for at, count in enumerate(counts)]
        return Scrape.parse("\n".join(["# TYPE quire:generation_tokens counter", *rows]) + "\n", time)

    assert overview(scrape(after, 2.0), scrape(before, 0.0), "ready")["generation_tokens_per_s"] == 100.0
