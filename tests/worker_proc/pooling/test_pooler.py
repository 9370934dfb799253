"""Vectors and scores of decoders against sentence-transformers and transformers, however the prompts are computed."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pooling_checkpoints import save_bi_encoder, save_cross_encoder, save_embedding, save_model, text_of
from pooling_steps import Pooled, PoolingRunner, Rows, cosines, embedding
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks
from tiers import covering, thinned

from quire.protocol.errors import ConfigError
from quire.protocol.model.weight_format import online_format
from quire.protocol.request.pooling_params import PoolingParams
from quire.worker_proc.batch.input_batch import StepRefused

SEED = random.Random(5)
PROMPTS = [[SEED.randrange(6, 97) for _ in range(length)] for length in (1, 40, 2, 17, 300, 63, 5, 130)]
LONG = [[SEED.randrange(6, 97) for _ in range(length)] for length in (2048, 1, 1500, 31)]
TOKENS = PoolingParams("token_embed")
CLASSIFY = PoolingParams("classify")
BI_ENCODERS = {
    "qwen3 last": ("Qwen3Model", "lasttoken", True),
    "llama mean": ("LlamaModel", "mean_tokens", True),
    "mistral cls": ("MistralModel", "cls_token", False),
}


class Reference:
    """Vectors of a model of transformers."""

    def __init__(self, model: Any, mode: str, *, normalize: bool) -> None:
        self._model, self._mode, self._normalize = model, mode, normalize

    def tokens(self, prompt: list[int]) -> Rows:
        """Return the hidden states, ``[tokens, size]``."""
        with torch.no_grad():
            hidden: Rows = self._model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        return hidden

    def vectors(self, prompts: list[list[int]], size: int = 32) -> Rows:
        """Return a vector of each prompt."""
        rows = []
        for prompt in prompts:
            hidden = self.tokens(prompt)
            row = {"lasttoken": hidden[-1], "mean_tokens": hidden.mean(0), "cls_token": hidden[0]}[self._mode][:size]
            rows.append(row / np.linalg.norm(row) if self._normalize else row)
        return np.stack(rows)


Folders = dict[str, tuple[Path, Reference]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return the folder of each bi-encoder, and its reference."""
    made = {}
    for name, (model, mode, normalize) in BI_ENCODERS.items():
        root = tmp_path_factory.mktemp("bi_encoder")
        reference = save_embedding(root, model, mode, normalize=normalize)
        made[name] = root, Reference(reference, mode, normalize=normalize)
    return made


@pytest.mark.parametrize("name", BI_ENCODERS)
def test_vectors_equal_those_of_transformers(name: str, folders: Folders) -> None:
    folder, reference = folders[name]
    want = reference.vectors(PROMPTS)
    whole = embedding(folder, PROMPTS)
    assert cosines(whole, want).min() >= 0.9999
    np.testing.assert_allclose(whole, want, atol=1e-4)
    np.testing.assert_allclose(embedding(folder, PROMPTS, chunk=7), want, atol=1e-4)
    alone = PoolingRunner(folder)
    for prompt, vector in zip(PROMPTS, want, strict=True):
        np.testing.assert_allclose(alone.pool([Pooled(prompt)])[0][0], vector, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls"])
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "LlamaModel"])
def test_vectors_equal_those_of_sentence_transformers(name: str, mode: str, tmp_path: Path) -> None:
    model = save_bi_encoder(tmp_path, name, mode, normalize=mode != "cls")
    folder, prompts = tmp_path / "saved", PROMPTS + LONG
    want = model.encode([text_of(prompt) for prompt in prompts])
    for chunk in (10**6, 512):
        got = embedding(folder, prompts, chunk=chunk)
        assert cosines(got, want).min() >= 0.9999
        np.testing.assert_allclose(got, want, atol=1e-3)
    cut = PoolingRunner(folder).pool([Pooled(PROMPTS[1], PoolingParams(dimensions=8))])
    np.testing.assert_allclose(cut[0][0] / np.linalg.norm(cut[0][0]), model.encode(
        [text_of(PROMPTS[1])], truncate_dim=8, normalize_embeddings=True)[0], atol=1e-4)  # fmt: skip
    tokens = model.encode([text_of(LONG[0])], output_value="token_embeddings")[0].numpy()
    assert cosines(PoolingRunner(folder).pool([Pooled(LONG[0], TOKENS)], chunk=500)[0], tokens).min() >= 0.9999
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"truncate_dim": 8}))
    short, each = PoolingRunner(folder).pool([Pooled(PROMPTS[1]), Pooled(LONG[0], TOKENS)])
    np.testing.assert_allclose(short[0], type(model)(str(folder)).encode(text_of(PROMPTS[1])), atol=1e-4)
    assert np.asarray(each).shape == tokens.shape


@pytest.mark.parametrize("name", thinned(BI_ENCODERS, keep=2))
def test_bits_do_not_depend_on_the_batch(name: str, folders: Folders) -> None:
    folder, _ = folders[name]
    runner = PoolingRunner(folder, deterministic=True)
    want = [runner.pool([Pooled(prompt)])[0] for prompt in PROMPTS]
    for chunk in (10**6, 9):
        got = runner.pool([Pooled(prompt) for prompt in reversed(PROMPTS)], chunk=chunk)
        assert all(np.array_equal(a, b) for a, b in zip(want, reversed(got), strict=True))


@pytest.mark.parametrize("name", thinned(["Qwen3ForSequenceClassification", "Qwen3ForCausalLM"], keep=1))
def test_bits_of_scores_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, name)
    if name.endswith("CausalLM"):
        _set(tmp_path, classifier_from_token=["no", "yes"])
    runner = PoolingRunner(tmp_path, deterministic=True)
    want = [runner.pool([Pooled(prompt, CLASSIFY)])[0] for prompt in PROMPTS]
    got = runner.pool([Pooled(prompt, CLASSIFY) for prompt in PROMPTS], chunk=9)
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


def test_vectors_are_cut_before_they_are_normalised(folders: Folders) -> None:
    folder, reference = folders["qwen3 last"]
    sizes = [8, 1, 32]
    kinds = [*(PoolingParams(dimensions=size) for size in sizes), PoolingParams(use_activation=False)]
    got = PoolingRunner(folder).pool([Pooled(PROMPTS[1], params) for params in kinds])
    for size, rows in zip(sizes, got, strict=False):
        np.testing.assert_allclose(rows, reference.vectors(PROMPTS[1:2], size), atol=1e-5)
    np.testing.assert_allclose(got[3][0], reference.tokens(PROMPTS[1])[-1], atol=1e-4)


@pytest.mark.parametrize("chunk", thinned([7, 10**6], keep=1))
def test_vectors_of_tokens(chunk: int, folders: Folders) -> None:
    folder, reference = folders["mistral cls"]
    got = PoolingRunner(folder).pool([Pooled(prompt, TOKENS) for prompt in PROMPTS], chunk=chunk)
    for prompt, rows in zip(PROMPTS, got, strict=True):
        np.testing.assert_allclose(rows, reference.tokens(prompt), atol=1e-4)


def test_prefixes_of_other_requests_are_read(folders: Folders) -> None:
    folder, reference = folders["qwen3 last"]
    runner = PoolingRunner(folder)
    held = PROMPTS[4]
    runner.step(**runner.adding({1: Pooled(held)}), counts=[(1, len(held))])
    queries = [held[:96] + PROMPTS[1], held[:288] + PROMPTS[0]]
    shared = {2: Pooled(queries[0], prefix=1, num_shared=96), 3: Pooled(queries[1], prefix=1, num_shared=288)}
    result = runner.step(parked=[1], **runner.adding(shared), counts=[(2, 40)])
    got = np.concatenate([rows for _, _, (rows,) in sorted(result.side[0].parts(), key=lambda part: part[0])])
    np.testing.assert_allclose(got, reference.vectors(queries), atol=1e-4)


def test_a_causal_model_embeds_beside_chatting(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3ForCausalLM")
    runner = PoolingRunner(tmp_path, pooling="mean")
    assert runner.config.model.generates
    chat = [Pooled(PROMPTS[3], None), Pooled(PROMPTS[6], None)]
    mixed = runner.pool([chat[0], *(Pooled(prompt) for prompt in PROMPTS), chat[1]], chunk=40)
    tokens = [runner.tokens[0], runner.tokens[len(PROMPTS) + 1]]
    assert len(tokens[0]) > 5 and not any(handle in runner.tokens for handle in range(1, 9))
    alone = PoolingRunner(tmp_path)
    alone.step(**alone.adding(dict(enumerate(chat))), counts=[(0, 17), (1, 5)])
    for _ in range(9):
        alone.step()
    assert [alone.tokens[0][:5], alone.tokens[1][:5]] == [own[:5] for own in tokens]
    assert np.array_equal(np.concatenate(mixed[1:-1]).shape, (8, 32))
    np.testing.assert_allclose(np.concatenate(mixed[1:-1]), embedding(tmp_path, PROMPTS, pooling="mean"), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "num_labels"), covering(["Qwen3ForSequenceClassification", "LlamaForSequenceClassification"], [3, 1])
)
def test_classification_equals_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    model = save_model(tmp_path, name, num_labels=num_labels)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    want = logits.sigmoid() if num_labels == 1 else logits.softmax(1)
    raw = PoolingParams("classify", use_activation=False)
    runner = PoolingRunner(tmp_path)
    assert not runner.config.model.generates
    for params, expected in ((CLASSIFY, want), (raw, logits)):
        got = np.concatenate(runner.pool([Pooled(prompt, params) for prompt in PROMPTS], chunk=50))
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)
    with pytest.raises(StepRefused, match="handle 0 samples tokens, but the model has no head for tokens"):
        PoolingRunner(tmp_path).pool([Pooled([5], None), Pooled([6], CLASSIFY)])


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Qwen3ForSequenceClassification", "Qwen3ForCausalLM"])
def test_scores_equal_those_of_cross_encoder(name: str, tied: bool, tmp_path: Path) -> None:
    labels = {} if name.endswith("CausalLM") else {"num_labels": 1}
    model = save_cross_encoder(tmp_path, name, tie_word_embeddings=tied, **labels)
    pairs = [(text_of(PROMPTS[1]), text_of(prompt)) for prompt in PROMPTS]
    want = model.predict(pairs)
    runner = PoolingRunner(tmp_path / "saved")
    prompts = [PROMPTS[1] + prompt for prompt in PROMPTS]
    got = np.concatenate(runner.pool([Pooled(prompt, CLASSIFY) for prompt in prompts], chunk=100))[:, 0]
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert got.argsort().tolist() == want.argsort().tolist()


def test_scores_are_the_probabilities_of_yes(tmp_path: Path) -> None:
    model = save_model(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
    _set(tmp_path, architectures=["Qwen3ForSequenceClassification"], classifier_from_token=["no", "yes"])
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([prompt])).logits[0, -1, 4:6] for prompt in PROMPTS])
    runner = PoolingRunner(tmp_path)
    assert runner.config.model.generates
    got = np.concatenate(runner.pool([Pooled(prompt, CLASSIFY) for prompt in PROMPTS], chunk=50))
    np.testing.assert_allclose(got, logits.softmax(1)[:, 1:].numpy(), atol=1e-5)


def _set(folder: Path, **fields: Any) -> None:
    """Set fields of a checkpoint's ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("kind", thinned(["mean", "label", "yes"], keep=2))
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    if kind == "mean":
        save_embedding(tmp_path, "LlamaModel", "mean_tokens")
    else:
        save_model(tmp_path, "Qwen3ForSequenceClassification" if kind == "label" else "Qwen3ForCausalLM")
    if kind == "yes":
        _set(tmp_path, classifier_from_token=["no", "yes"])
    params = PoolingParams() if kind == "mean" else CLASSIFY
    requests = [Pooled(prompt, params) for prompt in PROMPTS]
    want = np.concatenate(PoolingRunner(tmp_path).pool(requests))

    def on_rank(group: Any) -> Rows:
        runner = PoolingRunner(tmp_path, group=group, tensor_parallel_size=2)
        return np.concatenate(runner.pool(requests, chunk=60))

    first, second = on_ranks(2, on_rank)
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, want, atol=1e-4)


@pytest.mark.full
def test_int8_weights(folders: Folders) -> None:
    folder, reference = folders["qwen3 last"]
    plain = PoolingRunner(folder).config.model
    quantised = msgspec.structs.replace(plain, weight_format=online_format("int8"))
    got = embedding(folder, PROMPTS, model=quantised)
    agreement = cosines(got, reference.vectors(PROMPTS))
    assert agreement.min() > 0.9 and agreement.max() < 0.999999


@pytest.mark.full
def test_vectors_in_bfloat16(folders: Folders) -> None:
    for name in BI_ENCODERS:
        folder, reference = folders[name]
        assert cosines(embedding(folder, PROMPTS, dtype="bfloat16"), reference.vectors(PROMPTS)).min() > 0.99


@pytest.mark.full
def test_vectors_of_an_adapter(tmp_path: Path) -> None:
    """One batch with and without an adapter, against the checkpoint into whose weights it is merged."""
    folder, merged, adapter = tmp_path / "base", tmp_path / "merged", tmp_path / "adapter"
    save_embedding(folder, "Qwen3Model", "lasttoken")
    shutil.copytree(folder, merged)
    generator = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 32, generator=generator), torch.randn(32, 2, generator=generator) * 0.2
    adapter.mkdir()
    name = "layers.0.self_attn.q_proj"
    save_file(
        {f"base_model.model.model.{name}.lora_A.weight": down, f"base_model.model.model.{name}.lora_B.weight": up},
        adapter / "adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    tensors = load_file(merged / "model.safetensors")
    tensors[f"{name}.weight"] += 2.0 * (up @ down)
    save_file(tensors, merged / "model.safetensors")
    runner = PoolingRunner(folder, enable_lora=True, max_loras=2)
    runner.load_adapter(adapter, number=1, slot=0)
    got = np.concatenate(runner.pool([Pooled(prompt, adapter=at % 2) for at, prompt in enumerate(PROMPTS)], chunk=9))
    want = np.stack([embedding(folder, PROMPTS), embedding(merged, PROMPTS)])
    np.testing.assert_allclose(got, want[np.arange(8) % 2, np.arange(8)], atol=1e-5)
    assert cosines(want[0], want[1]).min() < 0.99


def test_rows_that_are_not_finite_are_bad(folders: Folders) -> None:
    folder, reference = folders["llama mean"]
    runner = PoolingRunner(folder)
    requests = {1: Pooled(PROMPTS[1]), 2: Pooled(PROMPTS[3]), 3: Pooled(PROMPTS[5], TOKENS)}
    runner.step(**runner.adding(requests), counts=[(handle, 16) for handle in requests])
    first = runner._blocks[1][0]
    for cache in runner.runner.forward.kv_caches:
        cache[:, first] = float("nan")
    result = runner.step(counts=[(1, 24), (2, 1), (3, 47)])
    assert result.bad == [1] and sorted(result.side[0].handles) == [1, 2, 3]
    fields = runner.adding({4: Pooled(PROMPTS[1])})
    runner.step(**fields | {"removed": [1, 2, 3]}, counts=[(4, 40)])
    ((_, _, (again,)),) = runner.results[-1].side[0].parts()
    assert not runner.results[-1].bad
    np.testing.assert_allclose(again[0], reference.vectors(PROMPTS[1:2])[0], atol=1e-4)


def test_parked_and_moved_rows_keep_their_sums(folders: Folders) -> None:
    folder, reference = folders["llama mean"]
    runner = PoolingRunner(folder)
    requests = {handle: Pooled(PROMPTS[index]) for handle, index in ((1, 3), (2, 1), (3, 5))}
    runner.step(**runner.adding(requests), counts=[(1, 17), (2, 20), (3, 20)])
    runner.step(removed=[1], parked=[3], counts=[(2, 5)])
    runner.step(unparked=[3], parked=[2], counts=[(3, 30)])
    last = runner.step(unparked=[2], counts=[(2, 15), (3, 13)])
    got = {handle: rows[0] for handle, _, (rows,) in last.side[0].parts()}
    want = reference.vectors([PROMPTS[1], PROMPTS[5]])
    np.testing.assert_allclose(got[2], want[0], atol=1e-4)
    np.testing.assert_allclose(got[3], want[1], atol=1e-4)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Pooled([5, 6], CLASSIFY), "has the pooling task classify; tasks of the model: embed, token_embed"),
        (Pooled([5, 6], PoolingParams(dimensions=33)), "has 33 dimensions, but vectors of the model have 32"),
        (Pooled([5] * 20, num_shared=16, prefix=-1), "has 16 computed tokens, but its pooling needs the hidden state"),
    ],
)
def test_requests_that_the_model_cannot_serve(request_: Pooled, reason: str, folders: Folders) -> None:
    with pytest.raises(StepRefused, match=reason):
        PoolingRunner(folders["llama mean"][0]).pool([request_])


def test_pooled_rows_have_no_draft_tokens(folders: Folders) -> None:
    runner = PoolingRunner(folders["llama mean"][0])
    with pytest.raises(StepRefused, match="handle 1 is pooled, and cannot have draft tokens"):
        runner.step(**runner.adding({1: Pooled([5, 6])}), counts=[(1, 3)], drafts=[(1, 1)])


def test_a_head_that_is_missing_or_unused(tmp_path: Path) -> None:
    save_embedding(tmp_path, "Qwen3Model", "lasttoken")
    tensors = load_file(tmp_path / "model.safetensors")
    _set(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert not PoolingRunner(tmp_path).config.model.generates
    save_file(tensors | {"lm_head.weight": torch.zeros(97, 32)}, tmp_path / "model.safetensors")
    assert PoolingRunner(tmp_path).config.model.generates
    _set(tmp_path, architectures=["Qwen3Model"])
    assert not PoolingRunner(tmp_path).config.model.generates, "the head is ignored"
    save_file(tensors | {"other.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"other\.weight is not part of the model"):
        PoolingRunner(tmp_path)
