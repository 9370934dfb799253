"""``quire serve`` with the demo model: the openai client, bad input, disconnects, signals."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engine_processes import processes_of
from served import QUIRE, Served
from waits import wait_for

STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def client(demo_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


class TestOpenAIClient:
    def test_a_streamed_chat_answer_with_usage(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(model="quire-demo", messages=STORY, temperature=0, max_tokens=150)
        pieces: list[str] = []
        usage: Any = None
        stream = client.chat.completions.create(
            model="quire-demo",
            messages=STORY,
            temperature=0,
            max_tokens=150,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == whole.choices[0].message.content
        assert len([piece for piece in pieces if piece]) > 10
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    def test_best_of_returns_the_most_likely_completions(self, client: openai.OpenAI) -> None:
        create = client.completions.create
        given = {"model": "quire-demo", "prompt": ["Once upon", "The capital of"], "max_tokens": 9, "seed": 3}
        generated = create(**given, n=6, logprobs=0)
        sums = [sum(choice.logprobs.token_logprobs) for choice in generated.choices]
        wanted: list[str] = []
        for first in (0, 6):
            best = sorted(range(first, first + 6), key=lambda index: -sums[index])[:2]
            wanted += [generated.choices[index].text for index in best]
        answer = create(**given, n=2, best_of=6)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert all(choice.logprobs is None for choice in answer.choices)
        assert answer.usage.completion_tokens == generated.usage.completion_tokens
        echoed = create(**given, n=2, best_of=6, echo=True, logprobs=1)
        prompts = [given["prompt"][index // 2] for index in range(4)]
        assert [choice.text for choice in echoed.choices] == [p + text for p, text in zip(prompts, wanted, strict=True)]
        assert all(len(choice.logprobs.top_logprobs[-1]) >= 1 for choice in echoed.choices)

    def test_beam_search_returns_its_outputs(self, client: openai.OpenAI) -> None:
        extra = {"use_beam_search": True, "beam_width": 3}
        found = client.completions.create(model="quire-demo", prompt="Once upon", max_tokens=8, extra_body=extra)
        scores = [choice.model_extra["score"] for choice in found.choices]
        assert len({choice.text for choice in found.choices}) == 3 and scores == sorted(scores, reverse=True)
        assert found.usage.completion_tokens == 24
        for wrong in ({"stream": True}, {"n": 2}, {"best_of": 4}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                client.completions.create(model="quire-demo", prompt="Once", max_tokens=8, extra_body=extra, **wrong)

    def test_token_id_prompts_and_logprobs(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model="quire-demo", prompt=[[5, 6, 7], [8, 9]], temperature=0, max_tokens=4, logprobs=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) >= 1
            assert all(value <= 0 for value in choice.logprobs.token_logprobs)
        assert answer.usage.prompt_tokens == 5

    def test_models_tokenize_and_version(self, client: openai.OpenAI, demo_server: Served) -> None:
        model = client.models.list().data[0]
        assert (model.id, model.model_extra["max_model_len"]) == ("quire-demo", 2048)
        tokens = httpx.post(f"{demo_server.url}/tokenize", json={"model": model.id, "prompt": "hello there"}).json()[
            "tokens"
        ]
        text = httpx.post(f"{demo_server.url}/detokenize", json={"model": model.id, "tokens": tokens}).json()["prompt"]
        assert text == "hello there"
        assert httpx.get(f"{demo_server.url}/version").json()["version"]

    def test_a_required_tool_call_is_returned(self, client: openai.OpenAI) -> None:
        schema = {"type": "object", "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}}}
        function = {"name": "set_clock", "parameters": {**schema, "required": ["hour"], "additionalProperties": False}}
        fields: dict[str, Any] = {"model": "quire-demo", "messages": STORY, "max_tokens": 100, "temperature": 0}
        fields["tools"] = [{"type": "function", "function": function}]
        named = {"type": "function", "function": {"name": "set_clock"}}
        for choice, reason in ((named, "stop"), ("required", "tool_calls")):
            answer = client.chat.completions.create(**fields, tool_choice=choice, parallel_tool_calls=False).choices[0]
            assert (answer.message.content, answer.finish_reason) == (None, reason)
            (call,) = answer.message.tool_calls
            assert call.function.name == "set_clock"
            assert 0 <= json.loads(call.function.arguments)["hour"] <= 23
            stream = client.chat.completions.create(
                **fields, tool_choice=choice, parallel_tool_calls=False, stream=True
            )
            deltas = [d for chunk in stream for each in chunk.choices for d in each.delta.tool_calls or ()]
            assert (deltas[0].function.name, bool(deltas[0].id)) == ("set_clock", True)
            assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments

    def test_a_response_format_is_satisfied(self, client: openai.OpenAI) -> None:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
        }
        answer = client.chat.completions.create(
            model="quire-demo", messages=STORY, temperature=0, max_tokens=50, response_format=wanted
        )
        assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="quire-demo", messages=STORY, extra_body={"structured_outputs": {"regex": "(a"}}
            )
        assert caught.value.code == "invalid_structured_outputs"

    def test_prompt_logprobs_with_echo(self, client: openai.OpenAI) -> None:
        """The request of evaluation harnesses: echo, no output tokens, prompts as token ids."""
        fields: dict[str, Any] = {"model": "quire-demo", "temperature": 0, "logprobs": 1}
        prompts = [[40, 41, 42, 43], [50, 51], [40 + i % 60 for i in range(2048)]]  # the last one fills the context
        answer = client.completions.create(**fields, prompt=prompts, max_tokens=0, echo=True)
        for choice, length in zip(answer.choices, (4, 2, 2048), strict=True):
            logprobs = choice.logprobs
            assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == length
            assert logprobs.token_logprobs[0] is None
            assert all(value < 0 for value in logprobs.token_logprobs[1:])
        assert answer.usage.completion_tokens == 0

    def test_ollamas_api_gives_the_same_answer(self, client: openai.OpenAI, demo_server: Served) -> None:
        fields = {"model": "quire-demo:latest", "messages": STORY, "options": {"temperature": 0, "num_predict": 40}}
        *parts, last = map(json.loads, httpx.post(f"{demo_server.url}/api/chat", json=fields).text.splitlines())
        whole = client.chat.completions.create(model="quire-demo", messages=STORY, temperature=0, max_tokens=40)
        assert "".join(part["message"]["content"] for part in parts) == whole.choices[0].message.content
        assert (last["done_reason"], last["eval_count"]) == (
            whole.choices[0].finish_reason,
            whole.usage.completion_tokens,
        )
        assert last["total_duration"] > last["prompt_eval_duration"] + last["eval_duration"] > 10**6

    def test_a_failing_request_gets_422(self, demo_server: Served) -> None:
        body = {"prompt": "x", "allowed_token_ids": [65], "structured_outputs": {"regex": "[0-9]{3}"}}
        for stream in (False, True):
            failed = httpx.post(f"{demo_server.url}/v1/completions", json={**body, "stream": stream}, timeout=60)
            assert failed.status_code == 422
            assert failed.json()["error"]["code"] == "request_failed"


BAD = [
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "from 0 to 2"),
    ({"prompt": "x", "kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params", "not supported"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": [1024]}, 400, "prompt", "from 0 to 1023"),
    ({"prompt": [5] * 2048}, 400, "prompt", "2048"),
    ({"prompt": "x", "model": "gpt-99"}, 404, "model", "gpt-99"),
]


class TestBadInput:
    def test_bad_input_is_refused_and_the_next_request_served(self, demo_server: Served) -> None:
        """A sample; tests/abuse has all cases."""
        for body, status, param, word in BAD:
            refused = httpx.post(f"{demo_server.url}/v1/completions", json=body)
            assert refused.status_code == status
            error = refused.json()["error"]
            assert error["param"] == param and word in error["message"], error
        good = httpx.post(
            f"{demo_server.url}/v1/completions", json={"model": "quire-demo", "prompt": "A", "max_tokens": 1}
        )
        assert good.status_code == 200

    @pytest.mark.full
    def test_a_burst_of_large_bodies_leaves_the_front_end_as_small_as_before(self, demo_server: Served) -> None:
        front_ends = processes_of(demo_server.process.pid, "quire.frontend.http")
        httpx.post(f"{demo_server.url}/v1/chat/completions", json={"messages": STORY, "max_tokens": 1})

        def memory() -> int:
            return sum(front_end.memory_info().rss for front_end in front_ends)

        before = memory()
        body = json.dumps({"messages": [{"role": "user", "content": "word " * (3 * 2**20)}]}).encode()

        def send(_: int) -> int:
            return httpx.post(f"{demo_server.url}/v1/chat/completions", content=body, timeout=60).status_code

        with ThreadPoolExecutor(8) as clients:
            assert set(clients.map(send, range(8))) <= {400, 503}
        wait_for(lambda: memory() <= before + len(front_ends) * 48 * 2**20, 30)

    def test_a_disconnected_client_frees_its_blocks(self, demo_server: Served) -> None:
        body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        before = demo_server.metrics()["quire:generation_tokens_total"]
        with httpx.stream("POST", f"{demo_server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            for _ in range(5):
                next(lines)
            assert demo_server.metrics()["quire:num_requests_running"] == 1
        assert demo_server.wait_until_idle()["quire:generation_tokens_total"] - before < 2000


@pytest.mark.full
class TestCommandLine:
    def test_a_port_in_use_is_reported_in_one_line(self, demo_server: Served) -> None:
        port = demo_server.url.rsplit(":", 1)[1]
        done = subprocess.run([*QUIRE, "serve", "--port", port], capture_output=True, text=True, timeout=60)
        assert done.returncode == 78
        assert done.stderr.count("\n") == 1 and f":{port} is in use" in done.stderr

    def test_bench_serve_runs_a_dataset(self, demo_server: Served, tmp_path: Path) -> None:
        dataset = Path(__file__).parent.parent / "data" / "taubench_excerpt.jsonl"
        out = tmp_path / "out.json"
        command = [*QUIRE, "bench", "serve", "--url", demo_server.url, "--dataset", str(dataset), "--max-tokens", "8"]
        done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        last = json.loads(done.stdout.splitlines()[-1])
        assert last == json.loads(out.read_text())
        demo_server.wait_until_idle()

    def test_keys_config_file_and_drain(self, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("served-model-name: [mine]\nnum-gpu-blocks-override: 300\napi-key: [secret]\n")
        served = Served("--config", str(config), "--max-num-seqs", "4")
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).json()["data"][0]["id"] == "mine"
        body = {"model": "mine", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert served.stop() == 0
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{served.url}/health")

    def test_requests_past_the_shutdown_timeout_get_server_shutdown(self) -> None:
        served = Served("--num-gpu-blocks-override", "300", "--shutdown-timeout", "0.1")
        body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            *_, last = [line for line in lines if line]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("server_shutdown", "the server is shutting down")
        assert served.stop() == 0

    @pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
    def test_signals_to_all_processes_stop_the_server_in_order_or_not_at_all(self, number: signal.Signals) -> None:
        before = signal.signal(number, signal.SIG_DFL)  # the server keeps ignoring SIGHUP if its parent does (nohup)
        served = Served("--num-gpu-blocks-override", "300")
        signal.signal(number, before)
        processes = processes_of(served.process.pid, "quire.")
        directory = next(word for each in processes for word in each.cmdline() if "/quire-" in word)
        body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            for harmless in (signal.SIGUSR1, signal.SIGALRM, signal.SIGUSR2):
                for process in processes:
                    process.send_signal(harmless)
            next(lines)
            for process in processes:  # the server itself is one of them
                process.send_signal(number)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert served.stop(0) == 0
        assert not Path(directory).exists()
