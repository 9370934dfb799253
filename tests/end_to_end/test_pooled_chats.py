"""Models that read texts with their chat template, over HTTP and from Python, beside sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooling_checkpoints import CHAT_VOCABULARY, CHATML, JUDGE, TYPED, save_chat_tokenizer, save_model

from quire import LLM

pytestmark = pytest.mark.full
FLOAT32: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**26}
TEXTS = ["hello world", "x", " the user says yes, and the system no ", "the quick brown fox " * 30]
MOST = 64
CUT = {"text": {"max_length": MOST, "truncation": True}}
PROMPTS = {"query": "Find the text:", "document": "Text:"}


def save(folder: Path, name: str, template: str, **settings: Any) -> Path:
    save_model(folder / "plain", name, vocab_size=CHAT_VOCABULARY, **settings)
    save_chat_tokenizer(folder / "plain", template)
    return folder / "plain"


def bi_encoder(folder: Path, template: str, mode: str, **more: Any) -> Any:
    """Save a model with PROMPTS as sentence-transformers saves it, and return it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    transformer = Transformer(str(save(folder, "Qwen3Model", template)), **more)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), mode), Normalize()]
    made = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS)
    made.save_pretrained(str(folder / "saved"), create_model_card=False)
    return SentenceTransformer(str(folder / "saved"), device="cpu")


def message_format(folder: Path) -> str:
    saved = json.loads((folder / "saved" / "sentence_bert_config.json").read_text())
    return str(saved["modality_config"].get("message", {}).get("format", ""))


def vectors(llm: LLM, *given: Any, **more: Any) -> Any:
    return np.stack([each.outputs.embedding for each in llm.embed(*given, **more) if each.outputs is not None])


def assert_equal(found: Any, wanted: Any) -> None:
    assert (np.asarray(found) * np.asarray(wanted)).sum(1).min() > 0.9999


@pytest.mark.parametrize(
    ("template", "form", "mode", "variables"),
    [
        (CHATML, "flat", "lasttoken", {"add_generation_prompt": True}),
        (TYPED, "structured", "mean", {}),
        ("", "", "lasttoken", {}),
    ],
)
def test_bi_encoders(template: str, form: str, mode: str, variables: dict[str, Any], tmp_path: Path) -> None:
    reference = bi_encoder(tmp_path, template, mode, processing_kwargs={"chat_template": variables})
    assert message_format(tmp_path) == form
    with LLM(tmp_path / "saved", **FLOAT32) as llm:
        assert_equal(vectors(llm, TEXTS), reference.encode(TEXTS))
        wanted = reference.encode(TEXTS, prompt_name="query")
        assert_equal(vectors(llm, TEXTS, prompt_name="query"), wanted)
        cut = {"prompt_name": "query", "truncate_prompt_tokens": MOST}
        assert_equal(vectors(llm, TEXTS, **cut), reference.encode(TEXTS, prompt_name="query", processing_kwargs=CUT))
        scores = [each.relevance_score for each in sorted(llm.rerank(TEXTS[0], TEXTS), key=lambda each: each.index)]
        assert scores == pytest.approx(reference.encode(TEXTS, prompt_name="document") @ wanted[0], abs=1e-4)
        ids = llm.embed("x")[0].prompt_token_ids
        assert_equal(vectors(llm, [ids]), reference.encode(["x"]))


@pytest.mark.parametrize(("name", "default"), [("Qwen3ForCausalLM", None), ("Qwen3ForSequenceClassification", "query")])
def test_cross_encoders(name: str, default: str | None, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = save(tmp_path, name, JUDGE, **({} if name.endswith("CausalLM") else {"num_labels": 1}))
    made = CrossEncoder(str(folder), device="cpu", prompts=PROMPTS, default_prompt_name=default)
    made.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    assert message_format(tmp_path) == "flat"
    reference = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    with LLM(tmp_path / "saved", **FLOAT32) as llm:
        found = [each.score for each in llm.score(TEXTS[0], TEXTS)]
        assert found == pytest.approx(reference.predict(pairs), abs=1e-4)
        ranked = llm.rerank(TEXTS[0], TEXTS)
        wanted = reference.rank(TEXTS[0], TEXTS)
        assert [each.index for each in ranked] == [each["corpus_id"] for each in wanted]
        most = 160
        found = [each.score for each in llm.score(TEXTS[0], TEXTS, truncate_prompt_tokens=most)]
        cut = {"text": {"max_length": most, "truncation": True}}
        assert found == pytest.approx(reference.predict(pairs, processing_kwargs=cut), abs=1e-4)
        if name.endswith("CausalLM"):
            found = [each.score for each in llm.score(TEXTS[0], TEXTS, instruction="Compare.")]
            assert found == pytest.approx(reference.predict(pairs, prompt="Compare."), abs=1e-4)


def test_default_prompt_of_a_cross_encoder_without_template(tmp_path: Path) -> None:
    """The prompt is before the first text."""
    from sentence_transformers import CrossEncoder

    folder = save(tmp_path, "Qwen3ForSequenceClassification", "", num_labels=1)
    made = CrossEncoder(str(folder), device="cpu", prompts=PROMPTS, default_prompt_name="query")
    made.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    wanted = made.predict([(TEXTS[0], text) for text in TEXTS])
    with LLM(tmp_path / "saved", **FLOAT32) as llm:
        assert [each.score for each in llm.score(TEXTS[0], TEXTS)] == pytest.approx(wanted, abs=1e-4)
