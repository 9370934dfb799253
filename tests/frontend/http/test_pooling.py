"""The routes of requests for vectors and scores, over an engine with made-up vectors."""

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine
from pooled_vectors import BOTH, CLASSIFIER, RERANKER, SIZE, embedding_of, pooled_update, rows_of, vector_of

from quire.frontend.engine.update import Update
from quire.frontend.http.app import make_app
from quire.frontend.http.serving.server import ServerSettings
from quire.frontend.text.pooling.capabilities import Capabilities
from quire.frontend.text.text_in import TextIn
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import PoolingParams
from quire.protocol.wire.front_end_messages import EndReason

BAD = 399
"""A token that makes a prompt fail."""
MANY = 65
"""The smallest number of inputs of which the response is written as results arrive."""


@pytest.fixture
def served(client: Any, engine: FakeEngine, text_in: TextIn) -> Callable[..., Any]:
    """Return a client of a server with this pooling; ``more``: further settings."""

    def serve(pooling: PoolingConfig | None = BOTH, *, generates: bool = True, **more: Any) -> Any:
        names = more.pop("served_model_names", ("tiny",))
        capabilities = Capabilities(generates, pooling)
        settings = ServerSettings(text_in=text_in, served_model_names=names, capabilities=capabilities, **more)
        return type(client)(make_app(engine, settings))

    return serve


def failing(prompt: list[int], params: PoolingParams) -> Update:
    """Return the result of a worker that finds NaN for prompts with the token BAD."""
    if BAD in prompt:
        return Update(ended=EndReason.ERROR, detail="numerical_error: the model's hidden states are not finite")
    return pooled_update(prompt, params)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


class TestEmbeddings:
    def test_one_text(self, served: Any, text_in: TextIn) -> None:
        response = served().post("/v1/embeddings", {"model": "tiny", "input": "hello world", "user": "x"})
        body = response.json()
        ids = text_in.encode("hello world")
        assert response.headers["content-length"] == str(len(response.content))
        assert (body["object"], body["model"]) == ("list", "tiny")
        (entry,) = body["data"]
        assert (entry["object"], entry["index"]) == ("embedding", 0)
        assert entry["embedding"] == embedding_of(ids).tolist()
        usage = body["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] == len(ids)
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids) // 2

    @pytest.mark.parametrize(
        ("given", "prompts"),
        [
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5], [6, 7]], [[5], [6, 7]]),
            (["hello", "world"], None),
        ],
    )
    def test_batches(self, served: Any, engine: FakeEngine, text_in: TextIn, given: Any, prompts: Any) -> None:
        body = served().post("/v1/embeddings", {"input": given}).json()
        wanted = prompts or [text_in.encode(text) for text in given]
        assert [each.prompt for each in engine.added] == wanted
        assert [entry["embedding"] for entry in body["data"]] == [embedding_of(ids).tolist() for ids in wanted]
        assert [entry["index"] for entry in body["data"]] == list(range(len(wanted)))

    def test_base64_is_little_endian_float32(self, served: Any) -> None:
        body = served().post("/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}).json()
        found = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
        assert found.tolist() == embedding_of([5, 6]).tolist()

    @pytest.mark.full
    def test_openai_client(self, served: Any) -> None:
        """It asks for base64 unless the caller names a format."""
        from openai import AsyncOpenAI

        app = served().app

        async def ask() -> None:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport) as http:
                openai = AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http)
                for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
                    made: Any = await openai.embeddings.create(model="tiny", input=[[5, 6], [7]], dimensions=4, **more)
                    found = [each.embedding for each in made.data]
                    if more == {"encoding_format": "base64"}:
                        found = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in found]
                    assert found == [embedding_of(ids, 4).tolist() for ids in ([5, 6], [7])]
                    assert made.usage.prompt_tokens == 3

        asyncio.run(ask())

    def test_parameters_reach_the_engine(self, served: Any, engine: FakeEngine) -> None:
        body = {"input": [5], "dimensions": 4, "normalize": False, "priority": 3, "cache_salt": "s"}
        body["skip_reading_prefix_cache"] = True
        assert served().post("/v1/embeddings", body).status_code == 200
        assert engine.pooling == [PoolingParams("embed", 4, False, skip_reading_prefix_cache=True)]
        assert engine.priorities == [(3, "s")]

    def test_truncation(self, served: Any, engine: FakeEngine, text_in: TextIn) -> None:
        text = "hello world " * 400
        ids = text_in.encode(text)
        client = served()
        for more, wanted in (
            ({"truncate_prompt_tokens": 5}, ids[:5]),
            ({"truncate_prompt_tokens": -1}, ids[:256]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ):
            assert client.post("/v1/embeddings", {"input": text, **more}).status_code == 200
            assert engine.added[-1].prompt == wanted
        error = error_of(client.post("/v1/embeddings", {"input": ["a", text]}))
        assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
        assert "tokens, and this model reads at most 256" in error["message"]

    def test_messages(self, served: Any, engine: FakeEngine, text_in: TextIn) -> None:
        messages = [{"role": "user", "content": "hello <|im_end|>"}]
        assert served().post("/v1/embeddings", {"messages": messages}).status_code == 200
        found = engine.added[-1].prompt
        assert text_in.decode(found, skip_special_tokens=False) == "<|im_start|>user\nhello <|im_end|><|im_end|>\n"
        assert found.count(2) == 1
        error = error_of(served().post("/v1/embeddings", {"messages": messages, "input": "x"}))
        assert error["message"] == "input and messages cannot be combined"

    def test_prompts_of_the_model(self, served: Any, engine: FakeEngine, text_in: TextIn) -> None:
        prompts = {"query": "find: ", "document": "text: "}
        client = served(PoolingConfig(tasks=["embed"], size=SIZE, prompts=prompts, default_prompt="document"))
        for name, before in ((None, "text: "), ("query", "find: "), ("", "")):
            given = {"input": "hello"} | ({} if name is None else {"prompt_name": name})
            assert client.post("/v1/embeddings", given).status_code == 200
            assert engine.added[-1].prompt == text_in.encode(before + "hello")
        error = error_of(client.post("/v1/embeddings", {"input": "x", "prompt_name": "nope"}))
        assert error["message"] == "prompt_name must be a prompt of this model (document, query) (got 'nope')"

    def test_texts_as_messages(self, served: Any, engine: FakeEngine, text_in: TextIn) -> None:
        prompts = {"query": "find"}
        client = served(PoolingConfig(tasks=["embed"], size=SIZE, prompts=prompts, message_format="flat"))
        user = "<|im_start|>user\nhello<|im_end|>\n"
        for name, before in (("", ""), ("query", "<|im_start|>system\nfind<|im_end|>\n")):
            assert client.post("/v1/embeddings", {"input": "hello", "prompt_name": name}).status_code == 200
            assert text_in.decode(engine.added[-1].prompt, skip_special_tokens=False) == before + user
        assert client.post("/rerank", {"query": "a", "documents": ["hello"]}).status_code == 200
        found = [text_in.decode(each.prompt, skip_special_tokens=False) for each in engine.added[-2:]]
        assert found == ["<|im_start|>system\nfind<|im_end|>\n<|im_start|>user\na<|im_end|>\n", user]
        error = error_of(client.post("/v1/embeddings", {"input": ["a", "hello" * 900]}))
        assert error["param"] == "input[1]" and "reads at most 256" in error["message"]

    @pytest.mark.parametrize(
        ("fields", "param", "message"),
        [
            ({}, "input", "input is required"),
            ({"input": []}, "input", "input must not be empty"),
            ({"input": ""}, "input", "input must hold at least one token"),
            ({"input": ["a", ""]}, "input[1]", "input[1] must hold at least one token"),
            ({"input": [[]]}, "input[0]", "input[0] must hold at least one token"),
            ({"input": {"a": 1}}, "input", "input must be a string, a list of token ids, or a list of these"),
            ({"input": ["a", 5]}, "input", "input must hold either strings or lists of token ids"),
            ({"input": [5, 420]}, "input", "input must hold token ids, integers from 0 to 419 (got 420)"),
            ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be an integer from 1 to 8 (got 0)"),
            ({"input": "a", "dimensions": 9}, "dimensions", "dimensions must be an integer from 1 to 8 (got 9)"),
            ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format must be float or base64"),
            ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or an integer from 1 to 256"),
            ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "(got 257)"),
            ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "must be equal"),
            ({"input": "a", "task": "classify"}, "task", "task must be embed on this route (got classify)"),
            ({"input": "a", "priority": 2**31}, "priority", "priority must be an integer"),
            ({"input": "a", "lora_path": "x"}, "lora_path", "lora_path is not supported"),
        ],
    )
    def test_bad_input(self, served: Any, engine: FakeEngine, fields: Any, param: str, message: str) -> None:
        error = error_of(served().post("/v1/embeddings", fields))
        assert error["param"] == param
        assert message in error["message"]
        assert not engine.added

    def test_sizes_of_the_model(self, served: Any) -> None:
        client = served(PoolingConfig(tasks=["embed"], size=SIZE, matryoshka_dimensions=[2, 4]))
        error = error_of(client.post("/v1/embeddings", {"input": "a", "dimensions": 3}))
        assert error["message"] == "dimensions must be one of 2, 4, 8 (got 3)"
        body = client.post("/v1/embeddings", {"input": [5], "dimensions": 2}).json()
        assert len(body["data"][0]["embedding"]) == 2

    def test_unknown_model_and_fields(self, served: Any) -> None:
        assert error_of(served().post("/v1/embeddings", {"input": "a", "model": "nope"}), 404)["param"] == "model"
        response = served().post("/v1/embeddings", {"input": "a", "inptu": 1})
        assert response.headers["x-quire-ignored-fields"] == "inptu"

    def test_request_id(self, served: Any, engine: FakeEngine) -> None:
        response = served().post("/v1/embeddings", {"input": "a"}, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"].startswith("embd-mine-")
        assert engine.added[0].request_id == response.json()["id"] + "-0"


class TestPooling:
    def test_default_task_and_vectors_of_tokens(self, served: Any) -> None:
        client = served()
        (entry,) = client.post("/pooling", {"input": [5, 6]}).json()["data"]
        assert (entry["object"], entry["data"]) == ("pooling", embedding_of([5, 6]).tolist())
        (entry,) = client.post("/pooling", {"input": [5, 6], "task": "token_embed"}).json()["data"]
        assert entry["data"] == [vector_of(5).tolist(), vector_of(6).tolist()]
        given = {"input": [5, 6], "task": "token_embed", "encoding_format": "base64"}
        (entry,) = client.post("/pooling", given).json()["data"]
        found = np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(2, SIZE)
        assert found.tolist() == [vector_of(5).tolist(), vector_of(6).tolist()]

    def test_many_rows_are_written_in_parts(self, served: Any, engine: FakeEngine) -> None:
        engine.max_model_len = 20_000
        ids = [5 + i % 300 for i in range(9_000)]
        response = served().post("/pooling", {"input": ids, "task": "token_embed"})
        assert response.json()["data"][0]["data"] == [vector_of(token).tolist() for token in ids]
        assert "content-length" not in response.headers

    def test_task_of_another_model(self, served: Any) -> None:
        error = error_of(served().post("/pooling", {"input": "a", "task": "classify"}))
        assert error["message"] == "task must be a task of this model (embed, token_embed) (got 'classify')"


class TestClassify:
    @pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
    def test_labels(self, served: Any, engine: FakeEngine, path: str) -> None:
        engine.pool = lambda prompt, params: pooled_update(prompt, params, 3)
        body = served(CLASSIFIER).post(path, {"input": [[5], [6, 7]], "use_activation": False}).json()
        for index, ids in enumerate(([5], [6, 7])):
            probs = rows_of(ids, PoolingParams("classify"), 3)[0]
            label = ["no", "maybe", "yes"][int(probs.argmax())]
            wanted = {"index": index, "label": label, "probs": probs.tolist(), "num_classes": 3}
            assert body["data"][index] == wanted
        assert engine.pooling == [PoolingParams("classify", 0, False)] * 2


class TestScore:
    @pytest.mark.parametrize("path", ["/score", "/v1/score"])
    def test_pairs(self, served: Any, engine: FakeEngine, text_in: TextIn, path: str) -> None:
        """With a model that reads both texts: one to one, one to many, many to many."""
        client = served(RERANKER)
        for first, second, pairs in (
            ("a", "b", ["ab"]),
            ("a", ["b", "c"], ["ab", "ac"]),
            (["a"], ["b", "c"], ["ab", "ac"]),
            (["a", "b"], ["c", "d"], ["ac", "bd"]),
        ):
            engine.added.clear()
            body = client.post(path, {"text_1": first, "text_2": second}).json()
            wanted = [text_in.encode(pair[0]) + text_in.encode(pair[1]) for pair in pairs]
            assert [each.prompt for each in engine.added] == wanted
            scores = [float(vector_of(sum(ids))[0]) for ids in wanted]
            assert [entry["score"] for entry in body["data"]] == scores
            assert [(entry["index"], entry["object"]) for entry in body["data"]] == [
                (index, "score") for index in range(len(pairs))
            ]

    def test_cosines(self, served: Any, text_in: TextIn) -> None:
        client = served()
        vectors = {text: embedding_of(text_in.encode(text)) for text in "abcd"}
        for first, second, pairs in (
            ("a", "b", ["ab"]),
            ("a", ["b", "a"], ["ab", "aa"]),
            (["a", "b"], ["c", "d"], ["ac", "bd"]),
        ):
            body = client.post("/score", {"text_1": first, "text_2": second}).json()
            wanted = [float(vectors[pair[0]] @ vectors[pair[1]]) for pair in pairs]
            assert [entry["score"] for entry in body["data"]] == pytest.approx(wanted, abs=1e-6)

    @pytest.mark.parametrize(
        ("fields", "param", "message"),
        [
            ({"text_2": "a"}, "text_1", "text_1 is required"),
            ({"text_1": "a", "text_2": []}, "text_2", "text_2 must not be empty"),
            ({"text_1": [], "text_2": []}, "text_1", "text_1 must not be empty"),
            ({"text_1": 5, "text_2": "a"}, "text_1", "text_1 must be a string or a list of strings (got 5)"),
            ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "or as many as text_2 (got 2 and 1)"),
            ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "or as many as text_2 (got 2 and 3)"),
            ({"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction", "this model has none"),
            ({"text_1": "a", "text_2": ["b", "hello" * 900]}, "text_2[1]", "reads at most 256"),
        ],
    )
    def test_bad_input(self, served: Any, fields: Any, param: str, message: str) -> None:
        for pooling in (BOTH, RERANKER):
            error = error_of(served(pooling).post("/score", fields))
            assert error["param"] == param
            assert message in error["message"]


class TestRerank:
    DOCUMENTS = ("one two", {"text": "three"}, "four five six")

    @pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
    @pytest.mark.parametrize("pooling", [BOTH, RERANKER])
    def test_best_first(self, served: Any, text_in: TextIn, path: str, pooling: PoolingConfig) -> None:
        client, texts = served(pooling), ["one two", "three", "four five six"]
        fields = {"query": "hello", "documents": self.DOCUMENTS}
        body = client.post(path, fields).json()
        query = text_in.encode("hello")
        if pooling is BOTH:
            wanted = [float(embedding_of(query) @ embedding_of(text_in.encode(text))) for text in texts]
        else:
            wanted = [float(vector_of(sum(query + text_in.encode(text)))[0]) for text in texts]
        order = sorted(range(3), key=lambda index: -wanted[index])
        results = body["results"]
        assert [result["index"] for result in results] == order
        assert [result["relevance_score"] for result in results] == pytest.approx(
            [wanted[index] for index in order], abs=1e-6
        )
        shown = [{"text": texts[index]} for index in order]
        assert [result.get("document") for result in results] == ([None] * 3 if path == "/v2/rerank" else shown)
        assert body["usage"]["total_tokens"] > 0
        best = client.post(path, fields | {"top_n": 2, "return_documents": path == "/v2/rerank"}).json()["results"]
        assert [result["index"] for result in best] == order[:2]
        assert [result.get("document") for result in best] == (shown[:2] if path == "/v2/rerank" else [None] * 2)

    def test_prompts_for_queries_and_documents(self, served: Any, engine: FakeEngine, text_in: TextIn) -> None:
        prompts = {"query": "find: ", "passage": "text: "}
        client = served(PoolingConfig(tasks=["embed"], size=SIZE, prompts=prompts))
        client.post("/rerank", {"query": "a", "documents": ["b"]})
        assert [each.prompt for each in engine.added] == [text_in.encode("find: a"), text_in.encode("text: b")]

    def test_instruction(self, served: Any, engine: FakeEngine, text_in: TextIn) -> None:
        judge = PoolingConfig(tasks=["classify"], size=SIZE, labels=["x"], label_token_ids=[5, 6])
        engine.max_model_len = 4000
        given = {"query": "a", "documents": ["b"], "instruction": "Judge."}
        assert served(judge).post("/rerank", given).status_code == 200
        text = text_in.decode(engine.added[-1].prompt, skip_special_tokens=False)
        assert "<Instruct>: Judge.\n<Query>: a\n<Document>: b<|im_end|>\n<|im_start|>assistant\n" in text

    @pytest.mark.parametrize(
        ("fields", "param", "message"),
        [
            ({"documents": ["a"]}, "query", "query is required"),
            ({"query": "a"}, "documents", "documents is required"),
            ({"query": "a", "documents": []}, "documents", "documents must not be empty"),
            ({"query": "a", "documents": "b"}, "documents", "documents must be a list of strings or of objects"),
            ({"query": "a", "documents": ["b", 5]}, "documents[1]", "a string or an object with text (got 5)"),
            ({"query": "a", "documents": [{"title": "b"}]}, "documents[0]", "a string or an object with text"),
            ({"query": ["a"], "documents": ["b"]}, "query", "query must be a string"),
            ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n must be an integer from 0"),
            ({"query": "a", "documents": ["b", "hello" * 900]}, "documents[1]", "reads at most 256"),
        ],
    )
    def test_bad_input(self, served: Any, fields: Any, param: str, message: str) -> None:
        for pooling in (BOTH, RERANKER):
            error = error_of(served(pooling).post("/rerank", fields))
            assert error["param"] == param
            assert message in error["message"]


class TestFailures:
    def test_one_of_a_few_fails_the_request(self, served: Any, engine: FakeEngine) -> None:
        engine.pool = failing
        error = error_of(served().post("/v1/embeddings", {"input": [[5], [BAD], [6]]}), 500)
        assert error["code"] == "numerical_error"

    def test_vector_that_is_not_finite(self, served: Any, engine: FakeEngine) -> None:
        engine.pool = lambda prompt, params: Update(
            ended=EndReason.STOPPED, pooled=np.array([[np.nan] * SIZE], np.float32)
        )
        error = error_of(served().post("/v1/embeddings", {"input": [5]}), 500)
        assert error["message"] == "the vector is not finite"

    def test_one_of_many_has_its_own_error(self, served: Any, engine: FakeEngine) -> None:
        """NaN, and a text that is too long."""
        engine.pool = failing
        inputs = [[5 + i] for i in range(MANY)]
        inputs[3], inputs[64] = [BAD], [5] * 257
        body = served().post("/v1/embeddings", {"input": inputs}).json()
        assert [entry["index"] for entry in body["data"]] == list(range(MANY))
        for index, entry in enumerate(body["data"]):
            if index in (3, 64):
                assert entry["embedding"] is None
                assert entry["error"]["code"] == ("numerical_error" if index == 3 else "context_length_exceeded")
            else:
                assert entry["embedding"] == embedding_of(inputs[index]).tolist()
        assert body["usage"]["prompt_tokens"] == MANY - 2

    def test_failed_documents_are_at_the_end(self, served: Any, engine: FakeEngine) -> None:
        engine.max_model_len = 60
        documents = ["hello"] * MANY
        documents[1] = "hello " * 100
        for pooling in (BOTH, RERANKER):
            body = served(pooling).post("/rerank", {"query": "a", "documents": documents}).json()
            last = body["results"][-1]
            assert (last["index"], last["relevance_score"]) == (1, None)
            assert last["error"]["param"] == "documents[1]"
            assert [result["index"] for result in body["results"][:-1]] == [0, *range(2, MANY)]

    @pytest.mark.parametrize("number", [1, MANY])
    def test_refusal_of_all(self, served: Any, engine: FakeEngine, number: int) -> None:
        """The scheduler refuses the priority: the request fails, and nothing is left in the engine."""

        def refuse(prompt: list[int], params: PoolingParams) -> Update:
            raise InvalidRequest("priority must be from 0 to 5", "priority", "priority_not_allowed")

        engine.pool = refuse
        assert error_of(served().post("/v1/embeddings", {"input": [[5]] * number}), 403)["param"] == "priority"

    def test_engine_failure(self, served: Any, engine: FakeEngine) -> None:
        def fail(prompt: list[int], params: PoolingParams) -> Update:
            raise EngineError("gone")

        engine.pool = fail
        assert error_of(served().post("/v1/embeddings", {"input": [[5]] * 3}), 503)["code"] == "engine_unavailable"

    def test_full_queue(self, served: Any, engine: FakeEngine) -> None:
        """What the scheduler refuses, while other inputs of the request wait, is submitted later."""
        seen: set[int] = set()

        def refuse_once(prompt: list[int], params: PoolingParams) -> Update:
            if prompt[0] % 3 == 0 and prompt[0] not in seen:
                seen.add(prompt[0])
                raise InvalidRequest("too many waiting requests", None, "queue_full")
            return pooled_update(prompt, params)

        engine.pool = refuse_once
        inputs = [[5 + i] for i in range(40)]
        body = served().post("/v1/embeddings", {"input": inputs}).json()
        assert [entry["embedding"] for entry in body["data"]] == [embedding_of(ids).tolist() for ids in inputs]
        engine.pool = failing
        engine.refuse = InvalidRequest("the engine is overloaded", None, "queue_full")
        assert error_of(served().post("/v1/embeddings", {"input": inputs}), 503)["code"] == "queue_full"

    def test_queue_limit_of_a_key(self, served: Any, engine: FakeEngine) -> None:
        """A long list waits for its own inputs, a few at a time, and is not refused."""
        client = served(max_num_queued_reqs_per_key=4)
        assert len(client.post("/v1/embeddings", {"input": [[5]] * 20}).json()["data"]) == 20

    def test_administrators_abort(self, served: Any, engine: FakeEngine) -> None:
        engine.pool = lambda prompt, params: Update(ended=EndReason.ABORTED)
        assert error_of(served().post("/v1/embeddings", {"input": [[5]] * 3}), 503)["code"] == "aborted"

    def test_not_ready(self, served: Any, engine: FakeEngine) -> None:
        engine.state = "loading"
        for path in ("/v1/embeddings", "/rerank", "/score", "/pooling"):
            assert error_of(served().post(path, {}), 503)["code"] == "engine_unavailable"

    def test_disconnect_aborts_the_rest(
        self, served: Any, engine: FakeEngine, connect: Any, finish: Callable[[Any], None]
    ) -> None:
        client = served()

        async def work() -> None:
            hang = asyncio.Event()

            def hold(prompt: list[int], params: PoolingParams) -> Update:
                connection.gone.set()
                return Update()  # it has not ended

            engine.pool = hold
            connection = connect("/v1/embeddings", {"input": [[5]] * 3})
            connection.app = client.app
            await connection.run()
            assert all(sequence.aborted for sequence in engine.added)
            assert not connection.sent
            hang.set()

        finish(work())


class TestWrongRoutes:
    def test_generative_model(self, served: Any) -> None:
        client = served(None)
        for path in ("/v1/embeddings", "/v1/rerank", "/score", "/classify", "/pooling"):
            error = error_of(client.post(path, {"input": "a"}))
            assert error["message"].startswith(f"{path} needs a model that ")
            assert "this model can generate text (/v1/chat/completions or /v1/completions)" in error["message"]
            assert (error["param"], error["code"]) == ("model", "unsupported_value")

    def test_embedding_model(self, served: Any, engine: FakeEngine) -> None:
        client = served(generates=False)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/sessions"):
            error = error_of(client.post(path, {"input": "a"}))
            wanted = f"{path} needs a model that generates text: this model can embed (/v1/embeddings), "
            assert error["message"].startswith(wanted)
        anthropic = client.post("/v1/messages", {}).json()
        assert anthropic["type"] == "error" and "generates text" in anthropic["error"]["message"]
        assert not engine.added

    def test_missing_head(self, served: Any) -> None:
        error = error_of(served(generates=False).post("/classify", {"input": "a"}))
        assert error["message"].startswith("/classify needs a model that has a classification head: this model can ")
        error = error_of(served(CLASSIFIER, generates=False).post("/rerank", {"query": "a", "documents": ["b"]}))
        wanted = "/rerank needs a model that makes vectors or has one label: this model can classify (/classify)"
        assert error["message"] == wanted

    def test_both_kinds(self, served: Any) -> None:
        client = served()
        assert client.complete().status_code == client.post("/v1/embeddings", {"input": "a"}).status_code == 200
        (card,) = client.get("/v1/models").json()["data"]
        assert card["tasks"] == ["generate", "embed", "token_embed", "score", "rerank"]

    def test_tasks_of_models(self, served: Any) -> None:
        for pooling, generates, tasks in (
            (None, True, ["generate"]),
            (RERANKER, False, ["classify", "score", "rerank"]),
            (CLASSIFIER, False, ["classify"]),
        ):
            (card,) = served(pooling, generates=generates).get("/v1/models").json()["data"]
            assert card["tasks"] == tasks


class TestManyInputs:
    @pytest.mark.parametrize("number", [1_500, pytest.param(10_000, marks=pytest.mark.full)])
    def test_first_entries_are_written_early(
        self, served: Any, engine: FakeEngine, connect: Any, finish: Callable[[Any], None], number: int
    ) -> None:
        """The first entries are written while most inputs are not submitted yet, and few are in the engine."""
        inputs = [[5 + i % 300, 5 + i // 300] for i in range(number)]
        connection = connect("/v1/embeddings", {"input": inputs})
        connection.app = served().app
        submitted: list[int] = []
        add = engine.add

        async def counted(*given: Any, **more: Any) -> Any:
            parts = sum(message["type"] == "http.response.body" for message in connection.sent)
            submitted.append(parts)
            return await add(*given, **more)

        engine.add = counted  # type: ignore[method-assign]
        finish(connection.run())
        before_first = submitted.count(0)
        assert before_first <= 512
        start, *parts = connection.sent
        assert start["status"] == 200 and len(parts) > 3
        body = json.loads(b"".join(part["body"] for part in parts))
        assert len(body["data"]) == number
        for index in (0, 511, 512, number - 1):
            assert body["data"][index]["embedding"] == embedding_of(inputs[index]).tolist()
        assert body["usage"]["prompt_tokens"] == 2 * number

    def test_slow_reader_stops_submission(
        self, served: Any, engine: FakeEngine, connect: Any, finish: Callable[[Any], None]
    ) -> None:
        connection = connect("/v1/embeddings", {"input": [[5]] * 1_500})
        connection.app = served().app

        async def work() -> None:
            reading, blocked = asyncio.Event(), asyncio.Event()
            send = connection._send

            async def slow(message: Any) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not reading.is_set():
                    blocked.set()
                    await reading.wait()

            connection._send = slow
            running = asyncio.create_task(connection.run())
            await blocked.wait()
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(engine.added) <= 1024
            reading.set()
            await running
            assert len(engine.added) == 1_500

        finish(work())


def test_metrics_and_access_log(served: Any) -> None:
    client = served()
    client.post("/v1/embeddings", {"input": [[5, 6], [7]]})
    text = client.get("/metrics").text
    assert 'quire:request_success_total{finished_reason="stop",model_name="tiny"} 2.0' in text
    assert 'quire:request_prompt_tokens_sum{model_name="tiny"} 3.0' in text


def test_traces(served: Any) -> None:
    spans: list[dict[str, Any]] = []

    class Tracer:
        def record(self, headers: Any, span: Any) -> None:
            spans.append(span.attributes())

        def close(self) -> None: ...

    client = served(tracer=Tracer())
    request_id = client.post("/v1/embeddings", {"input": [[5, 6], [7]]}).json()["id"]
    client.post("/v1/embeddings", {"input": [[5], [999]]})
    done, refused = spans
    assert (done["gen_ai.request.id"], done["gen_ai.usage.prompt_tokens"]) == (request_id, 3)
    assert (done["gen_ai.usage.num_sequences"], done["gen_ai.response.finish_reasons"]) == (2, ["stop"])
    assert (refused["gen_ai.usage.num_sequences"], refused["gen_ai.response.finish_reasons"]) == (0, ["abort"])
