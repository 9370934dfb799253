"""The small routes (models, health, metrics, tokens), and the application on real sockets with OpenAI's client."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.http.serving.socket_protocol import BoundedHttpProtocol
from quire.frontend.text.text_in import TextIn
from quire.protocol.wire.front_end_messages import Histogram, Statistics
from quire.version import __version__


class TestModels:
    def test_list(self, client: Any) -> None:
        body = client.get("/v1/models").json()
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
        assert body["data"][0]["max_model_len"] == 256
        assert client.get("/v1/models/alias").json() == body["data"][1]

    def test_model_name_with_a_slash(self, client: Any, engine: Any, text_in: TextIn) -> None:
        app = make_app(engine, ServerSettings(text_in=text_in, served_model_names=("org/name",)))
        assert type(client)(app).get("/v1/models/org/name").json()["id"] == "org/name"

    def test_version(self, client: Any) -> None:
        assert client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("loading", 503, 503),
        ("ready", 200, 200),
        ("recovering", 200, 200),
        ("draining", 200, 503),
        ("failed", 503, 503),
    ],
)
def test_health_and_readiness(client: Any, engine: Any, state: str, health: int, ready: int) -> None:
    engine.state = state
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (health, ready)
    assert client.get("/health").json() == {"status": state}


@pytest.mark.parametrize("state", ["ready", "recovering", "draining"])
def test_engine_without_progress_is_stuck(client: Any, engine: Any, state: str) -> None:
    engine.state, engine.seconds_without_progress = state, 59.0
    assert client.get("/health").status_code == 200
    engine.seconds_without_progress = 61.0
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (503, 503)
    assert client.get("/health").json() == {"status": "stuck"}


class TestTokens:
    def test_tokenize_and_detokenize(self, client: Any, tokenizer: Any) -> None:
        text = "hello 世界 <|im_end|>"
        body = client.post("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}).json()
        assert body["tokens"] == tokenizer.encode(text).ids
        assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 256)
        assert body["token_strs"][0] == "hello"
        assert client.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}

    def test_tokenizer_info(self, client: Any, text_in: Any) -> None:
        info = client.get("/tokenizer_info").json()
        assert info == {"chat_template": text_in.template.source, "model_max_length": 256}
        assert info["chat_template"].startswith("{%")

    def test_conversations(self, client: Any) -> None:
        messages = [{"role": "user", "content": "hello"}]
        tokens = client.post("/tokenize", {"messages": messages}).json()["tokens"]
        text = client.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": 7}, "prompt"),
            ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
            ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
            ("/detokenize", {"tokens": [420]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [1] * (2**19 + 1)}, "tokens"),
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_refusals(self, client: Any, path: str, body: Any, param: str) -> None:
        response = client.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


class TestMetrics:
    def test_names_and_values(self, client: Any, engine: Any) -> None:
        client.complete(max_tokens=50)
        client.complete(max_tokens=2)
        text = client.get("/metrics").text
        label = '{model_name="tiny"}'
        for line in (
            f"quire:num_requests_running{label} 3.0",
            f"quire:num_requests_waiting{label} 2.0",
            f"quire:kv_cache_usage_perc{label} 0.25",
            f"quire:num_free_blocks{label} 75.0",
            f"quire:num_usable_blocks{label} 100.0",
            f"quire:prefix_cache_hits_total{label} 16.0",
            f"quire:num_preemptions_total{label} 0.0",
            f"quire:time_to_first_token_seconds_count{label} 2.0",
            f"quire:e2e_request_latency_seconds_count{label} 2.0",
            f"quire:request_generation_tokens_sum{label} 8.0",
            'quire:request_success_total{finished_reason="stop",model_name="tiny"} 1.0',
            'quire:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        ):
            assert line in text.splitlines(), line

    def test_metrics_of_the_scheduler(self, client: Any, engine: Any) -> None:
        engine.figures = Statistics(
            query=1,
            num_cached_blocks=12,
            num_evicted_blocks=5,
            num_preemptions=3,
            num_requests_refused=4,
            waiting_by_reason={"capacity": 2, 'a"} 1\nquire:fake{x="': 1},
            preemptions_by_reason={"no_blocks": 3},
            kv_block_lifetime=Histogram([0.5, 1.0], [2, 0, 1], 4.5),
            num_draft_tokens=20,
            num_accepted_tokens=7,
            num_drafts=9,
            num_accepted_tokens_per_pos={"0": 5, "1": 2},
            num_invalid_draft_tokens=4,
        )
        lines = client.get("/metrics").text.splitlines()
        for line in (
            'quire:num_requests_waiting_by_reason{model_name="tiny",reason="capacity"} 2.0',
            'quire:num_preemptions_total{model_name="tiny"} 3.0',
            'quire:num_preemptions_by_reason_total{model_name="tiny",reason="no_blocks"} 3.0',
            'quire:num_cached_blocks{model_name="tiny"} 12.0',
            'quire:num_evicted_blocks_total{model_name="tiny"} 5.0',
            'quire:num_requests_refused_total{model_name="tiny"} 4.0',
            'quire:spec_decode_num_draft_tokens_total{model_name="tiny"} 20.0',
            'quire:spec_decode_num_accepted_tokens_total{model_name="tiny"} 7.0',
            'quire:spec_decode_num_drafts_total{model_name="tiny"} 9.0',
            'quire:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 2.0',
            'quire:spec_decode_num_invalid_draft_tokens_total{model_name="tiny"} 4.0',
            'quire:kv_block_lifetime_seconds_bucket{le="0.5",model_name="tiny"} 2.0',
            'quire:kv_block_lifetime_seconds_bucket{le="1.0",model_name="tiny"} 2.0',
            'quire:kv_block_lifetime_seconds_bucket{le="+Inf",model_name="tiny"} 3.0',
            'quire:kv_block_lifetime_seconds_count{model_name="tiny"} 3.0',
            'quire:kv_block_lifetime_seconds_sum{model_name="tiny"} 4.5',
        ):
            assert line in lines, line
        # Quotes and line breaks in a label value are escaped; a histogram without data is left out.
        assert not [line for line in lines if line.startswith("quire:fake")]
        assert not [line for line in lines if "kv_block_reuse_gap" in line]

    def test_failed_engine_leaves_the_front_ends_metrics(self, client: Any, engine: Any) -> None:
        engine.state = "failed"
        text = client.get("/metrics").text
        assert "quire:num_requests_running" not in text
        assert "quire:e2e_request_latency_seconds_count" in text


@pytest.fixture
def served(app: Starlette) -> Iterator[str]:
    """Serve the application with uvicorn on a free port; yield its URL."""
    config = uvicorn.Config(
        app, http=BoundedHttpProtocol, log_level="error", lifespan="off", access_log=False, ws="none"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


class TestOverSockets:
    def test_error_within_a_stream_reaches_the_openai_client(self, served: str, engine: Any) -> None:
        engine.ending = RuntimeError("inside")
        with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", max_tokens=50, stream=True)
            with pytest.raises(openai.APIError, match="internal error"):
                list(stream)

    def test_large_body_after_a_small_head(self, served: str) -> None:
        body = {"prompt": "x", "user": "y" * 2_000_000}
        with httpx.Client(base_url=served) as client:
            assert [client.post("/v1/completions", json=body).status_code for _ in range(2)] == [200, 200]
