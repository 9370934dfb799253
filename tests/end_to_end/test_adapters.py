"""LoRA adapters with real processes: mixed load, runtime loads with two front ends, deaths, adapters that are refused.

Every answer is compared with that of the same request alone, of a server that has nothing else to do.
"""

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import make_adapter
from chaos import HUNG_S, disturbed, request_of, streams
from fault_server import Role, wait_until
from live_streams import Answer, StreamRequest
from served import Served

from quire import LLM, LoRARequest, SamplingParams
from quire.launch import cli
from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.model.adapter_config import AdapterError
from quire.protocol.model.model_config import load_model_config

ADMIN = {"authorization": "Bearer admin"}
MODELS = ("quire-demo", "one", "two", "three")
PROMPT = "Once upon a time"


def requests(max_tokens: int, models: Sequence[str] = MODELS) -> list[StreamRequest]:
    """Return two greedy requests of each model, and one sampled request."""
    kinds: list[dict[str, object]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.0}]
    return [request_of(max_tokens, model=model, **kind) for kind in kinds for model in models]


MIXED = requests(70)


@pytest.fixture(scope="module")
def alone(demo_server: Served) -> list[Answer]:
    """The answers to MIXED, each alone."""
    answers = [asyncio.run(streams(demo_server.port, [request]))[0] for request in MIXED]
    assert [answer.error or answer.contradiction() for answer in answers] == [""] * len(answers)
    assert len({answer.choices[0].text for answer in answers}) == 2 * len(MODELS)
    return answers


def check_same(answers: Sequence[Answer], references: Sequence[Answer]) -> None:
    for answer, reference, request in zip(answers, references, MIXED, strict=True):
        assert answer.error == "", request.body
        assert answer.choices == reference.choices, request.body


@contextlib.contextmanager
def client(server: Served) -> Iterator[httpx.Client]:
    """A client each of whose requests has a connection of its own, which either front end may accept."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as made:
        yield made


def complete(http: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "model": model, **fields}
    return http.post("/v1/completions", json=body)


def text_of(http: httpx.Client, model: str, **fields: Any) -> str:
    answer = complete(http, model, **fields)
    assert (answer.status_code, answer.json().get("model")) == (200, model), answer.text
    return str(answer.json()["choices"][0]["text"])


def load(http: httpx.Client, name: str, adapters: Path, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(adapters), **fields}
    return http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(http: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields}, headers=ADMIN)


def test_mixed_load(demo_server: Served, alone: list[Answer]) -> None:
    """Of four models, two adapters fit in a step: each request has the tokens that it has alone."""
    check_same(asyncio.run(streams(demo_server.port, MIXED)), alone)


def test_models_and_dialects(demo_server: Served) -> None:
    with client(demo_server) as http:
        cards = {card["id"]: card["parent"] for card in http.get("/v1/models").json()["data"]}
        assert cards == {"quire-demo": None, **dict.fromkeys(("one", "two", "three", "bad"), "quire-demo")}
        texts = {model: text_of(http, model) for model in MODELS}
        assert len(set(texts.values())) == len(MODELS)
        messages = [{"role": "user", "content": "Tell me a story"}]
        for path, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 8}),
            ("/v1/responses", {"input": "Tell me a story", "max_output_tokens": 16}),
        ):
            answers = [http.post(path, json={"model": model, "temperature": 0, **body}).json() for model in MODELS]
            assert [answer["model"] for answer in answers] == list(MODELS)


@pytest.mark.full
def test_cached_prefixes_belong_to_one_content(demo_server: Served, adapters: Path) -> None:
    """A second name of one content hits its cache; another content and the model do not."""
    prompt = [*range(100, 164)]
    with client(demo_server) as http:
        shutil.copytree(adapters / "two", adapters / "same")
        cached = []
        for model in ("two", "two", "same", "three", "quire-demo"):
            usage = complete(http, model, prompt=prompt).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 48, 48, 0, 0]
        shutil.rmtree(adapters / "same")


def test_load_and_unload_with_two_front_ends(demo_server: Served, adapters: Path, tmp_path: Path) -> None:
    model = load_model_config(DEMO_MODEL)
    old, new = (make_adapter(tmp_path / f"v{i}", model, seed=10 + i, size=1.0) for i in (1, 2))
    with client(demo_server) as http:
        assert complete(http, "org/runtime").status_code == 404
        assert load(http, "org/runtime", old).json()["root"] == "v1"
        texts = {text_of(http, "org/runtime") for _ in range(8)}  # either front end
        assert len(texts) == 1
        assert load(http, "org/runtime", new).status_code == 409
        assert load(http, "org/runtime", new, load_inplace=True).status_code == 200
        replaced = {text_of(http, "org/runtime") for _ in range(8)}
        assert len(replaced) == 1
        assert replaced != texts
        for body in ({"lora_name": "org/runtime"}, {"lora_name": "org/runtime", "lora_path": str(old)}):
            for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                assert http.post(path, json=body).status_code == 401
        assert unload(http, "org/runtime").json()["deleted"] is True
        assert {complete(http, "org/runtime").status_code for _ in range(8)} == {404}
        assert unload(http, "org/runtime").status_code == 404
        assert load(http, "org/runtime", tmp_path / "none").status_code == 404
        assert load(http, "org/runtime", adapters / "bad").json()["error"]["code"] == "invalid_adapter"


@pytest.mark.full
def test_unload_with_requests(demo_server: Served, adapters: Path) -> None:
    """An unload waits for the requests of its name, reports them, or aborts them."""
    request = request_of(600, model="busy", temperature=0.0)

    async def test() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=demo_server.url, headers=ADMIN, timeout=60, limits=limits) as http:

            async def post(path: str, **body: Any) -> httpx.Response:
                return await http.post(f"/v1/{path}_lora_adapter", json={"lora_name": "busy", **body})

            async def act() -> None:
                assert (await http.post("/admin/pause?mode=keep")).status_code == 200  # so that the stream does not end
                refused = await post("unload", wait=False)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_in_use")
                unloading = asyncio.create_task(post("unload", force=forced))
                done, _ = await asyncio.wait([unloading], timeout=HUNG_S if forced else 0.2)
                assert bool(done) == forced
                assert (await http.post("/admin/resume")).status_code == 200
                assert (await unloading).json()["deleted"] is True

            for forced in (False, True):
                assert (await post("load", lora_path=str(adapters / "three"))).status_code == 200
                (answer,) = await disturbed(demo_server.port, [request], act, 5)
                assert bool(answer.error) == forced
                if not forced:
                    assert answer.num_tokens == 600

    asyncio.run(test())


@pytest.mark.full
def test_bad_adapters_leave_other_streams_alone(demo_server: Served, alone: list[Answer], adapters: Path) -> None:
    """Requests of adapters that cannot be used are refused while streams of others run."""

    def act() -> None:
        with client(demo_server) as http:
            for _ in range(3):
                assert complete(http, "none").status_code == 404
                refused = complete(http, "bad").json()["error"]
                assert (refused["code"], str(adapters) in refused["message"]) == ("invalid_adapter", False)
                assert load(http, "x", adapters / "bad").status_code == 400
                assert load(http, "x", adapters / "missing").status_code == 404
                assert load(http, "one", adapters / "two").status_code == 409

    async def in_thread() -> None:
        await asyncio.to_thread(act)

    check_same(asyncio.run(disturbed(demo_server.port, MIXED, in_thread, 30)), alone)


def test_content_that_changes_behind_a_name_is_not_loaded(demo_server: Served, tmp_path: Path) -> None:
    """The folder of a name that was loaded gets other content before a worker has loaded it."""
    model = load_model_config(DEMO_MODEL)
    changed = make_adapter(tmp_path / "changed", model, seed=20)
    with client(demo_server) as http:
        assert load(http, "changed", changed).status_code == 200
        make_adapter(changed, model, seed=21)
        answer = complete(http, "changed")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "adapter_not_loaded"), error
        assert "has changed" in error["message"]
        assert str(tmp_path) not in error["message"]
        assert load(http, "changed", changed, load_inplace=True).status_code == 200
        assert text_of(http, "changed")
        assert unload(http, "changed").status_code == 200


@pytest.mark.full
class TestDeaths:
    @pytest.mark.parametrize("after", [1, 150])
    @pytest.mark.parametrize("role", ["worker", "scheduler"])
    def test_answers_survive(self, demo_server: Served, alone: list[Answer], role: Role, after: int) -> None:
        answers = asyncio.run(disturbed(demo_server.port, MIXED, lambda: demo_server.victims(role)[0].kill(), after))
        check_same(answers, alone)

    def test_names_survive_front_ends(self, demo_server: Served, adapters: Path) -> None:
        with client(demo_server) as http:
            assert load(http, "kept", adapters / "two").status_code == 200
            expected = text_of(http, "two")
            for _ in range(2):
                victim = demo_server.victims("frontend")[0]
                victim.kill()
                victim.wait(HUNG_S)
                assert wait_until(lambda: len(demo_server.victims("frontend")) == 2, HUNG_S) is not None
            assert {_patient_text(http, "kept") for _ in range(8)} == {expected}
            assert unload(http, "kept").status_code == 200

    def test_names_survive_a_scheduler_and_a_worker(self, demo_server: Served, adapters: Path) -> None:
        with client(demo_server) as http:
            assert load(http, "kept", adapters / "three").status_code == 200
            expected = text_of(http, "kept")
            roles: tuple[Role, ...] = ("scheduler", "worker")
            for role in roles:
                demo_server.victims(role)[0].kill()
                assert text_of(http, "kept") == expected
            assert unload(http, "kept").status_code == 200


def _patient_text(http: httpx.Client, model: str) -> str:
    """Return the text; a new front end may still refuse connections."""
    for _ in range(100):
        with contextlib.suppress(httpx.TransportError):
            return text_of(http, model)
    raise AssertionError("no front end answers")


def test_a_bad_module_ends_the_start_with_one_line(adapters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--lora-modules", f"a={adapters / 'bad'}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 78 and "DoRA is not supported" in line


@pytest.mark.full
def test_run_batch_and_generate(adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"model": model, **BODY}}
        for i, model in enumerate(("quire-demo", "one", "two", "none"))
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match="1"):  # a line failed
        cli.main(["run-batch", *files, "--dtype", "float32", "--lora-dir", str(adapters)])
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [result["response"]["status_code"] for result in results] == [200, 200, 200, 404]
    texts = [result["response"]["body"]["choices"][0]["text"] for result in results[:3]]
    assert len(set(texts)) == 3
    capsys.readouterr()
    words = ["--prompt", PROMPT, "--max-tokens", "12", "--json", "--dtype", "float32"]
    cli.main(["generate", *words, "--lora", str(adapters / "one")])
    assert json.loads(capsys.readouterr().out)["text"] == texts[1]


BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}


@pytest.mark.full
def test_offline(adapters: Path) -> None:
    one, two = (LoRARequest(name, i, adapters / name) for i, name in enumerate(("one", "two"), 1))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(dtype="float32", deterministic=True, enable_lora=True, max_loras=1) as llm:
        orders = [None, one, two, one, None]
        texts = [out.outputs[0].text for out in llm.generate([PROMPT] * 5, params, lora_request=orders)]
        assert texts[0] == texts[4] == llm.generate(PROMPT, params)[0].outputs[0].text
        assert texts[1] == texts[3] == llm.generate(PROMPT, params, lora_request=one)[0].outputs[0].text
        assert len(set(texts)) == 3
        assert llm.beam_search(PROMPT, 2, max_tokens=8, lora_request=one)[0].finished
        message = [{"role": "user", "content": "Hello"}]
        assert llm.chat(message, params, lora_request=two)[0].finished
        running = llm.start(PROMPT, params, lora_request=one)
        running.read(4)
        assert [fork.read().text for fork in llm.fork(running, n=2)] == [texts[1]] * 2
        with pytest.raises(AdapterError, match="DoRA"):
            llm.generate(PROMPT, params, lora_request=LoRARequest("bad", 3, adapters / "bad"))
