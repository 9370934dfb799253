"""Vectors and scores over HTTP, from Python and on the command line, beside those of sentence-transformers."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from checkpoints import TINY
from encoder_checkpoints import save_encoder
from pooling_checkpoints import save_bi_encoder, save_model, save_tokenizer, text_of
from served import QUIRE, Served
from tokenizers import Tokenizer, processors

from quire import LLM
from quire.protocol.errors import ConfigError, InvalidRequest

pytestmark = pytest.mark.full
CHANCE = random.Random(1)
LENGTHS = (1, 2, 7, 16, 33, 200, 600)
TEXTS = [text_of([CHANCE.randrange(6, 90) for _ in range(length)]) for length in LENGTHS]
FLAGS = ("--dtype", "float32")
FLOAT32: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**26}


@pytest.fixture(scope="module")
def bi_encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bi_encoder")
    made = save_bi_encoder(folder, "Qwen3Model", "lasttoken")
    return folder / "saved", made


@pytest.fixture(scope="module")
def server(bi_encoder: tuple[Path, Any]) -> Iterator[Served]:
    served = Served(str(bi_encoder[0]), *FLAGS)
    yield served
    served.end()


def _add_template(folder: Path, *, gives_types: bool) -> None:
    """Give the tokenizer of a folder the special tokens and token types of BERT.

    ``gives_types``: the names of its outputs have those of types, which those of its class have not.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    if not gives_types:
        return
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))


def cosines(found: Any, wanted: Any) -> Any:
    one, other = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


class TestServer:
    def test_openai_client(self, server: Served, bi_encoder: tuple[Path, Any]) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            made = client.embeddings.create(model=client.models.list().data[0].id, input=TEXTS)
        wanted = bi_encoder[1].encode(TEXTS)
        assert cosines([each.embedding for each in made.data], wanted).min() > 0.9999
        assert made.usage.prompt_tokens == sum(LENGTHS)

    def test_dimensions_and_prompts(self, server: Served, bi_encoder: tuple[Path, Any]) -> None:
        given = {"input": TEXTS, "dimensions": 8, "prompt_name": "query"}
        body = httpx.post(f"{server.url}/v1/embeddings", json=given).json()
        wanted = bi_encoder[1].encode(TEXTS, prompt_name="query", truncate_dim=8)
        found = [entry["embedding"] for entry in body["data"]]
        assert cosines(found, wanted).min() > 0.9999
        assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-5)

    def test_vectors_of_tokens(self, server: Served, bi_encoder: tuple[Path, Any]) -> None:
        given = {"input": TEXTS[3:5], "task": "token_embed", "use_activation": False}
        body = httpx.post(f"{server.url}/pooling", json=given).json()
        wanted = bi_encoder[1].encode(TEXTS[3:5], output_value="token_embeddings")
        for entry, rows in zip(body["data"], wanted, strict=True):
            assert np.asarray(entry["data"]) == pytest.approx(rows.numpy(), abs=1e-4)

    def test_cosines_of_rerank(self, server: Served, bi_encoder: tuple[Path, Any]) -> None:
        body = httpx.post(f"{server.url}/v1/rerank", json={"query": TEXTS[2], "documents": TEXTS}).json()
        query = bi_encoder[1].encode([TEXTS[2]], prompt_name="query")
        wanted = cosines(bi_encoder[1].encode(TEXTS), query)
        for result in body["results"]:
            assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-5)

    def test_wrong_route_and_models(self, server: Served) -> None:
        given = {"messages": [{"role": "user", "content": "w7"}]}
        response = httpx.post(f"{server.url}/v1/chat/completions", json=given)
        assert response.status_code == 400 and "generates text" in response.text
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert card["tasks"] == ["embed", "token_embed", "score", "rerank"]

    def test_many_texts_in_one_body(self, server: Served) -> None:
        texts = [text_of([6 + i % 200, 6 + i // 200]) for i in range(2_000)]
        body = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=120).json()
        assert [entry["index"] for entry in body["data"]] == list(range(2_000))
        alone = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts[777]}).json()["data"][0]
        assert cosines([alone["embedding"]], [body["data"][777]["embedding"]]).min() > 0.99999
        metrics = server.wait_until_idle()
        assert metrics["quire:num_requests_running"] == 0

    def test_command_line(self, server: Served, bi_encoder: tuple[Path, Any], tmp_path: Path) -> None:
        lines = tmp_path / "lines.txt"
        lines.write_text("\n".join(TEXTS[:3]) + "\n")
        made = tmp_path / "vectors.npy"
        command = [*QUIRE, "embed", str(lines), "--url", server.url]
        subprocess.run([*command, "--format", "npy", "-o", str(made)], check=True)
        with made.open("rb") as file:
            vectors = np.lib.format.read_array(file, allow_pickle=False)
        assert cosines(vectors, bi_encoder[1].encode(TEXTS[:3])).min() > 0.9999
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = [json.loads(line) for line in printed.splitlines()]
        assert [each["index"] for each in found] == [0, 1, 2]
        assert [each["embedding"] for each in found] == vectors.tolist()
        refused = subprocess.run([*command, "--dimensions", "99"], capture_output=True, text=True)
        assert refused.returncode != 0 and "dimensions must be an integer" in refused.stderr


class TestOffline:
    def test_bi_encoder(self, bi_encoder: tuple[Path, Any]) -> None:
        with LLM(bi_encoder[0], **FLOAT32) as llm:
            outputs = llm.embed(TEXTS)
            found = [each.outputs.embedding for each in outputs if each.outputs is not None]
            wanted = bi_encoder[1].encode(TEXTS)
            assert cosines(found, wanted).min() > 0.9999
            assert [len(each.prompt_token_ids) for each in outputs] == list(LENGTHS)
            (cut,) = llm.embed(TEXTS[-1], truncate_prompt_tokens=16)
            assert len(cut.prompt_token_ids) == 16
            ranked = llm.rerank(TEXTS[2], TEXTS, 2)
            assert len(ranked) == 2 and ranked[0].relevance_score > ranked[1].relevance_score
            (score,) = llm.score(TEXTS[0], TEXTS[1])
            assert score.score == pytest.approx(float(cosines(wanted[:1], wanted[1:2])[0]), abs=1e-5)
            (rows,) = llm.encode(TEXTS[3])
            assert rows.outputs is not None and rows.outputs.data.shape == (16, wanted.shape[1])
            for call in (lambda: llm.generate("w7"), lambda: llm.start("w7"), lambda: llm.classify("w7")):
                with pytest.raises(InvalidRequest, match=r"needs a model that .* this model can embed \(LLM.embed\)"):
                    call()
            with pytest.raises(InvalidRequest, match=r"prompts\[1\] has 2400 tokens"):
                llm.embed(["w7", " ".join(["w7"] * 2400)])
            assert llm.statistics().num_running == 0

    @pytest.mark.parametrize("gives_types", [True, False])
    def test_bert_as_cross_encoder(self, tmp_path: Path, gives_types: bool) -> None:
        """Pairs have token types as in transformers, and are cut as by it."""
        save_encoder(tmp_path, "bert", "ForSequenceClassification", num_labels=1, vocab_size=TINY["vocab_size"])
        save_tokenizer(tmp_path)
        _add_template(tmp_path, gives_types=gives_types)
        from sentence_transformers import CrossEncoder

        reference = CrossEncoder(str(tmp_path), device="cpu")
        query, texts = TEXTS[2], [*TEXTS, TEXTS[-1] * 3]
        wanted = reference.predict([(query, text) for text in texts])
        with LLM(tmp_path, **FLOAT32) as llm:
            found = llm.score(query, texts, truncate_prompt_tokens=-1)
            assert [each.score for each in found] == pytest.approx(wanted.tolist(), abs=1e-4)
            ranked = llm.rerank(query, texts, truncate_prompt_tokens=-1)
            assert [each.index for each in ranked] == np.argsort(-wanted, kind="stable").tolist()
            with pytest.raises(InvalidRequest, match=r"text_2\[6\] has 610 tokens, and this model reads at most 520"):
                llm.score(query, TEXTS)
        with pytest.raises(ConfigError, match="--cpu-offload-bytes cannot be used with an encoder"):
            LLM(tmp_path, cpu_offload_bytes=2**20)

    def test_both_kinds(self, tmp_path: Path) -> None:
        """A model that generates text makes vectors, too, if a flag says how."""
        save_model(tmp_path, "Qwen3ForCausalLM")
        with LLM(tmp_path, pooling="mean", max_num_queued_reqs=2, **FLOAT32) as llm:
            prompts = [[7, 8, 9 + i] for i in range(50)]
            made = llm.embed(prompts)[0]
            assert [each.prompt_token_ids for each in llm.embed(prompts)] == prompts
            assert made.outputs is not None and np.linalg.norm(made.outputs.embedding) == pytest.approx(1.0, abs=1e-5)
            assert llm.generate([[7, 8, 9]])[0].outputs[0].token_ids
