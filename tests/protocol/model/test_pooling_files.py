"""The pooling of a checkpoint: files of sentence-transformers, fields of config.json, the flag; one error a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig, load_model_config
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.model.pooling_files import with_pooling

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
CLASSIFIER = {"config.json": QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]}}


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


EMBEDDING: dict[str, Any] = {
    "config.json": QWEN3,
    "modules.json": [module("Transformer"), module("Pooling", "1_Pooling"), module("Normalize", "2_Normalize")],
    "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True},
    "config_sentence_transformers.json": {
        "prompts": {"query": "Instruct: find\nQuery:", "document": None},
        "default_prompt_name": "query",
    },
    "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
}
LOGIT_SCORE: dict[str, Any] = {
    "config.json": QWEN3,
    "modules.json": [module("Transformer"), module("LogitScore", "1_LogitScore")],
    "1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": 3},
    "sentence_bert_config.json": {"transformer_task": "text-generation"},
}

CHAT: dict[str, Any] = {"modality_config": {"message": {"format": "flat"}}}


def read(folder: Path, files: dict[str, Any]) -> ModelConfig:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return load_model_config(folder)


def pooling(folder: Path, files: dict[str, Any]) -> PoolingConfig:
    found = read(folder, files).pooling
    assert found is not None
    return found


def test_bi_encoder(tmp_path: Path) -> None:
    model = read(tmp_path, EMBEDDING)
    assert model.generates
    assert model.pooling == PoolingConfig(
        tasks=["embed", "token_embed"],
        pooling="last",
        normalize=True,
        size=64,
        max_tokens=256,
        lowercase=True,
        prompts={"query": "Instruct: find\nQuery:", "document": ""},
        default_prompt="query",
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, "last"),
    ],
)
def test_pooling_modes(fields: dict[str, Any], expected: str, tmp_path: Path) -> None:
    files = EMBEDDING | {"1_Pooling/config.json": {"embedding_dimension": 64} | fields}
    assert pooling(tmp_path, files | {"modules.json": EMBEDDING["modules.json"][:2]}).pooling == expected
    assert not pooling(tmp_path, files | {"modules.json": EMBEDDING["modules.json"][:2]}).normalize


def test_sizes_of_vectors(tmp_path: Path) -> None:
    whole = {"__version__": {}, "truncate_dim": 48}
    cut = {"config.json": QWEN3 | {"is_matryoshka": True, "matryoshka_dimensions": [32, 16, 32]}}
    found = pooling(tmp_path, EMBEDDING | cut | {"config_sentence_transformers.json": whole})
    assert (found.size, found.matryoshka_dimensions, found.prompts) == (64, [16, 32], {})
    assert (found.width("embed"), found.width("embed", 16), found.width("token_embed")) == (48, 16, 64)
    assert found.dimensions_allowed(48) == "" and found.dimensions_allowed(64) == "one of 16, 32, 48"
    uncut = pooling(tmp_path, EMBEDDING | {"config.json": QWEN3 | {"is_matryoshka": False}})
    assert uncut.matryoshka_dimensions == [64]


def test_longest_prompt_is_the_tokenizers(tmp_path: Path) -> None:
    files = EMBEDDING | {"sentence_bert_config.json": {}}
    for limit, expected in ((300, 300), (512, 0), (1e30, 0), (None, 0)):
        assert pooling(tmp_path, files | {"tokenizer_config.json": {"model_max_length": limit}}).max_tokens == expected


@pytest.mark.parametrize("files", [EMBEDDING, LOGIT_SCORE])
def test_texts_that_are_rendered(files: dict[str, Any], tmp_path: Path) -> None:
    saved = files["sentence_bert_config.json"]
    text: dict[str, Any] = {"text": {"method": "forward"}}
    for form in ("flat", "structured"):
        chat = {"modality_config": text | {"message": {"format": form}}}
        found = pooling(tmp_path, files | {"sentence_bert_config.json": saved | chat})
        assert (found.message_format, found.template_variables) == (form, {})
        assert with_pooling(load_model_config(tmp_path), "none").pooling is None
    variables = {"add_generation_prompt": True, "enable_thinking": False}
    chat["processing_kwargs"] = {"chat_template": variables}
    found = pooling(tmp_path, files | {"sentence_bert_config.json": saved | chat})
    assert found.template_variables == variables
    for modalities in (None, text):
        plain = {"sentence_bert_config.json": saved | {"modality_config": modalities}}
        assert pooling(tmp_path, files | plain).message_format == ""


def test_base_models_take_the_mean(tmp_path: Path) -> None:
    model = read(tmp_path, {"config.json": QWEN3 | {"architectures": ["Qwen3Model"]}})
    assert model.architecture == "Qwen3ForCausalLM" and not model.generates
    assert model.pooling is not None and model.pooling.pooling == "mean" and model.pooling.normalize
    chat = read(tmp_path, {"config.json": QWEN3})
    assert chat.pooling is None and chat.generates


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Gemma2", "Gemma3Text", "Phi3"])
def test_classifications_of_all_families(name: str, tmp_path: Path) -> None:
    fields = {"architectures": [f"{name}ForSequenceClassification"], "id2label": {"1": "good", "0": "bad"}}
    model = read(tmp_path, {"config.json": QWEN3 | fields})
    assert model.architecture == f"{name.removesuffix('Text')}ForCausalLM" and not model.generates
    assert model.pooling is not None and model.pooling.labels == ["bad", "good"]
    assert (model.pooling.tasks, model.pooling.activation) == (["classify"], "softmax")


@pytest.mark.parametrize(
    ("num_labels", "fields", "saved", "expected"),
    [
        (1, {}, {}, "sigmoid"),
        (3, {}, {}, "softmax"),
        (3, {"problem_type": "multi_label_classification"}, {}, "sigmoid"),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, ""),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, ""),
        (1, {}, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        (3, {}, {"activation_fn": "torch.nn.modules.linear.Identity"}, "softmax"),
        (3, {}, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_activation(
    num_labels: int, fields: dict[str, Any], saved: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    config = CLASSIFIER["config.json"] | {"num_labels": num_labels} | fields
    found = pooling(tmp_path, {"config.json": config, "config_sentence_transformers.json": saved})
    assert (found.activation, len(found.labels), found.labels[0]) == (expected, num_labels, "LABEL_0")


def test_scores_by_tokens(tmp_path: Path) -> None:
    model = read(tmp_path, LOGIT_SCORE)
    assert model.generates and model.pooling is not None
    assert (model.pooling.label_token_ids, model.pooling.activation, model.pooling.tasks) == (
        [3, 9],
        "sigmoid",
        ["classify"],
    )
    assert model.pooling.width("classify") == 1 and not model.pooling.needs_every_token("classify")
    one = LOGIT_SCORE | {"1_LogitScore/config.json": {"true_token_id": 9, "false_token_id": None}}
    assert pooling(tmp_path, one).label_token_ids == [9]


def test_flag(tmp_path: Path) -> None:
    chat = read(tmp_path, {"config.json": QWEN3})
    assert with_pooling(chat, "auto") is chat and with_pooling(chat, "none").pooling is None
    cls = with_pooling(chat, "cls")
    assert cls.generates
    assert cls.pooling == PoolingConfig(tasks=["embed", "token_embed"], pooling="cls", normalize=True, size=64)
    embedding = with_pooling(read(tmp_path, EMBEDDING), "mean").pooling
    assert embedding is not None and (embedding.pooling, embedding.max_tokens) == ("mean", 256)
    base = read(tmp_path, EMBEDDING | {"config.json": QWEN3 | {"architectures": ["Qwen3Model"]}})
    with pytest.raises(ConfigError, match="--pooling none: the checkpoint has no head for tokens"):
        with_pooling(base, "none")
    with pytest.raises(ConfigError, match="--pooling last: the checkpoint classifies, and makes no vectors"):
        with_pooling(read(tmp_path, LOGIT_SCORE), "last")


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"modules.json": {}}, "modules.json: must hold a JSON array"),
    "no JSON": ({"modules.json": "["}, "modules.json: cannot be read as JSON"),
    "no modules": ({"modules.json": []}, "modules.json: the first module must be Transformer"),
    "a text": ({"modules.json": ["x"]}, "modules.json: each module must be an object"),
    "a path": ({"modules.json": [module("Transformer", "../x")]}, r"path '\.\./x' must be the name of a folder"),
    "parent": ({"modules.json": [module("Transformer", "..")]}, r"path '\.\.' must be the name of a folder"),
    "no first": ({"modules.json": [module("Pooling", "1_Pooling")]}, "the first module must be Transformer"),
    "dense": (
        {"modules.json": [*EMBEDDING["modules.json"][:2], module("Dense", "2_Dense")]},
        "modules Transformer, Pooling, Dense with transformer_task 'feature-extraction' are not supported",
    ),
    "nothing pooled": ({"modules.json": [module("Transformer")]}, "modules Transformer with transformer_task"),
    "no labels": (
        {
            "modules.json": [module("Transformer")],
            "sentence_bert_config.json": {"transformer_task": "sequence-classification"},
        },
        "modules Transformer with transformer_task 'sequence-classification' are not supported",
    ),
    "task": ({"sentence_bert_config.json": {"transformer_task": 7}}, "with transformer_task 7 are not supported"),
    "kind": ({"config_sentence_transformers.json": {"model_type": "SparseEncoder"}}, "model_type 'SparseEncoder'"),
    "no pooling": ({"modules.json": [module("Transformer"), module("Pooling", "x")]}, "x/config.json: cannot be read"),
    "max": ({"1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "max"}}, "pooling_mode 'max'"),
    "no mode": ({"1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": 7}}, "pooling_mode 7 is not"),
    "two": (
        {"1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": ["cls", "mean"]}},
        r"pooling_mode \['cls', 'mean'\] is not supported; supported: lasttoken, mean, cls",
    ),
    "prompt": (
        {"1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": False}},
        "include_prompt false is supported only",
    ),
    "size": ({"1_Pooling/config.json": {"embedding_dimension": 65}}, "embedding_dimension must be the model's hidden"),
    "flag": ({"1_Pooling/config.json": {"embedding_dimension": 64, "pooling_mode_lasttoken": 1}}, "pooling_mode_last"),
    "input": ({"2_Normalize/config.json": {"module_input_name": "x"}}, "2_Normalize/config.json: module_input_name"),
    "prompts": ({"config_sentence_transformers.json": {"prompts": ["a"]}}, "prompts must be an object of texts"),
    "default": (
        {"config_sentence_transformers.json": {"prompts": {"a": "b"}, "default_prompt_name": "c"}},
        "config_sentence_transformers.json: default_prompt_name 'c' is not among prompts: a",
    ),
    "length": ({"sentence_bert_config.json": {"max_seq_length": -1}}, "max_seq_length must be an integer from 1"),
    "messages": (
        {"sentence_bert_config.json": {"modality_config": {"message": {"format": "auto"}}}},
        "modality_config.message.format 'auto' is not supported; supported: flat, structured",
    ),
    "variables": (
        {"sentence_bert_config.json": CHAT | {"processing_kwargs": {"chat_template": {"x": []}}}},
        "processing_kwargs.chat_template must be an object of texts, integers and booleans",
    ),
    "parameters": (
        {"sentence_bert_config.json": CHAT | {"processing_kwargs": {"chat_template": {"truncation": False}}}},
        "processing_kwargs.chat_template.truncation is not supported",
    ),
    "cut": (
        {"config_sentence_transformers.json": {"truncate_dim": 65}},
        "truncate_dim must be an integer from 1 to 64",
    ),
    "cuts": ({"config.json": QWEN3 | {"matryoshka_dimensions": [0]}}, "integers from 1 to 64"),
    "labels": (
        CLASSIFIER | {"config.json": CLASSIFIER["config.json"] | {"id2label": {"1": "x"}}},
        "id2label must have",
    ),
    "tokens": (
        {"config.json": QWEN3 | {"classifier_from_token": "yes"}},
        "classifier_from_token must be a list of one",
    ),
    "directions": ({"config.json": QWEN3 | {"is_causal": False}}, "is_causal false"),
    "no token": ({"config.json": QWEN3 | {"classifier_from_token": ["a"]}}, "tokenizer.json: cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    change, message = DAMAGED[name]
    files = EMBEDDING | change
    if "modules.json" not in change and "config.json" in change and name != "cuts":
        files = {"config.json": change["config.json"]}
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, files)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1_LogitScore/config.json": {"true_token_id": 100}}, "true_token_id must be an integer from 0 to 99"),
        ({"1_LogitScore/config.json": {"true_token_id": 1, "module_input_name": "x"}}, "module_input_name 'x'"),
        ({"config_sentence_transformers.json": {"activation_fn": "torch.nn.Tanh"}}, "activation_fn 'torch.nn.Tanh' is"),
        ({"config.json": QWEN3 | {"architectures": ["Qwen3Model"]}}, "need a model with a head for tokens"),
    ],
)
def test_damaged_files_of_scores(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, LOGIT_SCORE | change)


ODD = [None, [], {}, 1.5, -1, 10**400, "x", "", True, [None], {"a": [1]}, float("inf"), "../../x", ["x"] * 3]


@pytest.mark.full
@pytest.mark.parametrize("files", [EMBEDDING, LOGIT_SCORE, CLASSIFIER], ids=["embedding", "score", "labels"])
def test_odd_values_are_read_or_refused(files: dict[str, Any], tmp_path: Path) -> None:
    """Each field of each file with each value: a pooling, or an error in one line."""
    extra = {"config_sentence_transformers.json": {"activation_fn": None, "model_type": None, "truncate_dim": None}}
    extra["sentence_bert_config.json"] = files.get("sentence_bert_config.json", {}) | CHAT | {"processing_kwargs": None}
    extra["tokenizer_config.json"] = {"model_max_length": None}
    own = ("id2label", "num_labels", "problem_type", "is_matryoshka", "matryoshka_dimensions", "sentence_transformers")
    extra["config.json"] = files["config.json"] | dict.fromkeys((*own, "classifier_from_token", "is_causal"))
    for name, content in (files | extra).items():
        if not isinstance(content, dict):
            continue
        for field in content:
            if name == "config.json" and field not in extra["config.json"].keys() - QWEN3.keys():
                continue
            for value in ODD:
                changed = {key: old for key, old in content.items() if old is not None} | {field: value}
                try:
                    read(tmp_path, files | {name: changed})
                except ConfigError as error:
                    assert "\n" not in str(error), (name, field, value)


def test_links_out_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    read(folder, EMBEDDING)
    outside = tmp_path / "outside.json"
    outside.write_text("{}")
    target = folder / "1_Pooling" / "config.json"
    target.unlink()
    target.symlink_to(outside)
    with pytest.raises(ConfigError, match="symbolic link to a file outside"):
        load_model_config(folder)
    target.unlink()
    target.parent.rmdir()
    target.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder, not a symbolic link"):
        load_model_config(folder)
