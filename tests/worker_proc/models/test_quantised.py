"""Quantised checkpoints against transformers with the weights that the formats define, on one and two ranks."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import greedy_tokens
from inprocess import InProcessEngine
from packed_models import build_packed, load_packed, logits_of, prompts, resident_bytes
from quantised_checkpoints import FILE, FORMATS, quantise_checkpoint
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRank, on_ranks
from tiers import covering, thinned

from quire.kernels.common.scaled_linear import round_to_fp8, round_to_int8
from quire.kernels.cpu.native.library import load_native
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import parse_options
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.model_config import load_model_config
from quire.protocol.model.weight_format import online_format
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.formats.quantised import QuantisedLinear
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup.loader import fill_model, init_dummy_weights, load_weights

Factory = Callable[..., tuple[Path, Any]]
Tensors = dict[str, torch.Tensor]

SIZES = {"hidden_size": 64, "intermediate_size": 96}
"""Two and three groups of 32 inputs: on two ranks one has a group more."""
HEADS = {"head_dim": 16}
LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": HEADS, "mixtral": {}, "gemma": HEADS, "phi3": {}}
OF_LLAMA4 = HEADS | {"intermediate_size_mlp": 64}
IN_ONE_BLOCK = ("fp8-blocks", "fp8-inverse-scales")
"""Formats whose blocks hold rows of several projections of these small models, which fused tensors must not have."""
CASES = [
    (family, form)
    for form in FORMATS
    for family in FAMILIES
    if form not in ("w8a8", "fp8-token") and (family, form) not in [("phi3", each) for each in IN_ONE_BLOCK]
]
CASES += [("glm4", "awq"), ("glm4", "gptq-act-order")]  # outputs are ordered after the product
CASES += [("llama4", form) for form in ("w4a16", "fp8-blocks", "nvfp4", "awq")]


def covering_forms() -> list[Any]:
    """Return all cases; in ``make test`` each format runs with one family, and the families take turns."""
    turns = dict(zip(FORMATS, itertools.cycle(FAMILIES), strict=False))
    kept = {(turns[form] if (turns[form], form) in CASES else "llama", form) for _, form in CASES}
    return [case if case in kept else pytest.param(*case, marks=pytest.mark.full) for case in CASES]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _quantised(model: Decoder) -> list[QuantisedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantisedLinear)]


def _expected(plain: Path, rounded: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """Return the logits of transformers, whose linear layers get their inputs ``rounded``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    if rounded is not None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    return torch.cat([model(prompt[None]).logits[0] for prompt in prompts()])


def _in_int8(x: torch.Tensor) -> torch.Tensor:
    codes, scales = round_to_int8(x)
    return codes * scales


def _in_fp8(x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """The rounding of compressed-tensors, with a scale for each token or a given one."""
    scales = x.abs().amax(-1, keepdim=True) / 448 if scale is None else scale
    return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "w8a8": _in_int8,
    "fp8-token": _in_fp8,
    "fp8-inverse-scales": _in_fp8,  # these models have no more than 128 inputs: one group
    "fp8-one-scale": lambda x: _in_fp8(x, 0.5),
    "modelopt-fp8": lambda x: _in_fp8(x, 0.5),
}


def _assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((logits - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize(("family", "form"), covering_forms())
def test_logits_equal_transformers_on_one_and_two_ranks(
    family: str, form: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    source, _ = checkpoint_factory(family, **SIZES, **(FAMILIES | {"llama4": OF_LLAMA4}).get(family, HEADS))
    expected = _expected(quantise_checkpoint(source, tmp_path, FORMATS[form]()))
    _assert_close(logits_of(load_packed(tmp_path / "packed")), expected)
    for logits in on_ranks(2, lambda parallel: logits_of(load_packed(tmp_path / "packed", parallel))):
        _assert_close(logits, expected)


def _assert_close_but_for_ties(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Where a value lies between two codes, the last bit of a sum decides."""
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert float((errors < 1e-5).float().mean()) > 0.2 and float(errors.max()) < 0.1


@pytest.mark.parametrize(
    ("family", "form"),
    thinned([*(("llama", form) for form in ROUNDED), ("qwen3", "w8a8"), ("phi3", "fp8-token")], keep=2),
)
def test_rounded_activations_follow_the_format(
    family: str, form: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    source, _ = checkpoint_factory(family, **SIZES, **FAMILIES[family])
    plain = quantise_checkpoint(source, tmp_path, FORMATS[form]())
    expected = _expected(plain, ROUNDED[form])
    _assert_close_but_for_ties(logits_of(load_packed(tmp_path / "packed", rounds=True)), expected)
    assert float((_expected(plain) - expected).norm() / expected.norm()) > 3e-3


def test_fp8_activations_give_the_log_probabilities_of_compressed_tensors(
    checkpoint_factory: Factory, tmp_path: Path
) -> None:
    """transformers loads the packed folder itself, and rounds activations by its own code."""
    from transformers import AutoModelForCausalLM

    source, _ = checkpoint_factory("llama", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS["fp8-token"]())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32).eval()
    expected = torch.cat([model(prompt[None]).logits[0] for prompt in prompts()])
    logits = logits_of(load_packed(tmp_path / "packed", rounds=True))
    _assert_close_but_for_ties(logits.log_softmax(-1), expected.log_softmax(-1))
    options = parse_options({"round_activations": False}, "LLM")
    form = make_engine_config(options, folder=tmp_path / "packed").model.weight_format
    assert form is not None and not form.fp8_activations


def test_activations_are_rounded_in_groups() -> None:
    x = torch.randn(3, 80) * torch.logspace(-3, 3, 80)
    found = round_to_fp8(x.bfloat16(), 32)
    for start in (0, 32, 64):  # the last group is smaller
        part = slice(start, start + 32)
        assert torch.equal(found[:, part], _in_fp8(x.bfloat16().float()[:, part]).bfloat16())
    assert torch.equal(round_to_fp8(torch.zeros(2, 8)), torch.zeros(2, 8)) and round_to_fp8(x[:0]).shape == (0, 80)


def test_engines_generate_the_tokens_of_transformers(checkpoint_factory: Factory, tmp_path: Path) -> None:
    """Through the configuration, the memory plan and the prepacked layers of a worker."""
    from transformers import AutoModelForCausalLM

    source, _ = checkpoint_factory("mixtral", **SIZES)
    reference = AutoModelForCausalLM.from_pretrained(quantise_checkpoint(source, tmp_path, FORMATS["awq"]())).eval()
    folder = tmp_path / "packed"
    model = make_engine_config(parse_options({}, "LLM"), folder=folder).model
    engine = InProcessEngine(folder, max_model_len=96, model=model, long_prefill_token_threshold=13)
    given = [prompt.tolist() for prompt in prompts()]
    for index, prompt in enumerate(given):
        engine.add(str(index), prompt, max_tokens=8)
    answers = engine.run()
    for index, prompt in enumerate(given):
        assert answers[str(index)].tokens == greedy_tokens(reference, [prompt], 8)[0]


def _rounded_weight(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "int4":
        grouped = weight.unflatten(1, (-1, 32))
        high, low = grouped.amax(-1, keepdim=True), grouped.amin(-1, keepdim=True)
        scale = (torch.where(high > -low, high, low) / -8).bfloat16().float()
        return ((grouped / scale).round().clamp(-8, 7) * scale).flatten(1)
    scale = weight.abs().amax(1, keepdim=True) / (127 if kind == "int8" else 448)
    codes = weight / scale
    return (codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()) * scale


@pytest.mark.parametrize(
    ("kind", "family"), covering(["int8", "fp8", "int4"], ["llama", "mixtral", "phi3", "deepseek_v3", "llama4"])
)
def test_plain_checkpoints_are_rounded_when_they_are_loaded(
    kind: str, family: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    source, _ = checkpoint_factory(family, **SIZES, **{"deepseek_v3": LATENTS, "llama4": OF_LLAMA4}.get(family, {}))
    plain = quantise_checkpoint(source, tmp_path, ({}, lambda weight: ({}, _rounded_weight(weight, kind))))
    config = msgspec.structs.replace(load_model_config(source), weight_format=online_format(kind))

    def load(parallel: ThreadRank | None = None) -> Decoder:
        model = build_model(config, torch.float32, "cpu", parallel=parallel)
        load_weights(model, source, torch.float32, progress=False)
        model.prepack()
        return model

    expected = _expected(plain)
    _assert_close(logits_of(load()), expected)
    if kind == "int4":  # the others have a scale for all inputs of a rank
        for logits in on_ranks(2, lambda parallel: logits_of(load(parallel))):
            _assert_close(logits, expected)
    init_dummy_weights(model := build_model(config, torch.float32, "cpu"), seed=1)
    assert logits_of(model).isfinite().all()


def test_groups_of_zeros_and_non_finite_weights(checkpoint_factory: Factory, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_factory("llama", **SIZES)[0], tmp_path / "copy")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / FILE).items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][:, :32] = 0
    tensors[name][0] = 0
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    for kind in ("int8", "fp8", "int4"):
        options = parse_options({"quantization": kind}, "LLM")
        engine = InProcessEngine(folder, max_model_len=96, model=make_engine_config(options, folder=folder).model)
        layers = [module for module in engine.runner._model.modules() if isinstance(module, QuantisedLinear)]
        assert len(layers) == 8 and all(layer.form.kind == kind for layer in layers)
        engine.add("a", [3, 4, 5], max_tokens=4)
        assert len(engine.run()["a"].tokens) == 4
    tensors[name][5, 7] = torch.nan
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"tensor {name} has non-finite values in float32"):
        model = make_engine_config(parse_options({"quantization": "fp8"}, "LLM"), folder=folder).model
        InProcessEngine(folder, max_model_len=96, model=model)


def test_a_quantised_checkpoint_is_not_rounded_again(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS["gptq"]())
    with pytest.raises(ConfigError, match="--quantization int8: the checkpoint's weights are quantised already"):
        make_engine_config(parse_options({"quantization": "int8"}, "LLM"), folder=tmp_path / "packed")


@pytest.mark.parametrize(
    "leave", thinned(["lm_head|v_proj", "lm_head|layers.1", "lm_head|self_attn", "lm_head|mlp"], keep=2)
)
def test_layers_that_the_files_leave_plain(leave: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    """Some projections of a fused layer, whole layers, all attention: the files decide."""
    source, _ = checkpoint_factory("llama", **SIZES)
    plain = quantise_checkpoint(source, tmp_path, FORMATS["w4a16"](), leave=leave)
    _assert_close(logits_of(load_packed(tmp_path / "packed")), _expected(plain))


@pytest.mark.parametrize("form", thinned([form for form in FORMATS if form != "fp8-small-blocks"], keep=3))
def test_resident_weights_are_at_most_a_twentieth_larger_than_the_file(
    form: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    """On ``meta``, as the memory plan counts them, as loaded, and packed. Wide, so that scales and norms are few."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 96}
    source, _ = checkpoint_factory("mixtral", **sizes)
    quantise_checkpoint(source, tmp_path, FORMATS[form](), bfloat16=True)
    folder = tmp_path / "packed"
    most = 1.05 * sum(tensor.nbytes for tensor in load_file(folder / FILE).values())
    config = with_stored_format(folder, stored_tensors(folder), load_model_config(folder))
    model = build_model(config, torch.bfloat16, "cpu")
    load_weights(model, folder, torch.bfloat16, progress=False)
    for built in (build_model(config, torch.bfloat16, "meta"), model):
        assert sum(p.nbytes for p in built.parameters()) <= most
    model.prepack()
    assert resident_bytes(model) <= most


@pytest.mark.parametrize("form", thinned(FORMATS, keep=4))
def test_dummy_weights_have_numbers_of_usual_size(form: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS[form]())
    model = build_packed(tmp_path / "packed")
    init_dummy_weights(model, seed=1)
    layers = [module.scaled_weight() for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == (14 if form in ("gptq-act-order", "gptq-asymmetric", "w4a16-act-order") else 8)
    assert all(0.005 < float(layer.dequantise().std()) < 0.08 for layer in layers)
    assert logits_of(model).isfinite().all()


def test_deterministic_rows_ignore_their_batch(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS["w4a16"]())
    model = build_packed(tmp_path / "packed")
    load_weights(model, tmp_path / "packed", torch.float32, progress=False)
    model.prepack(deterministic=True)
    layer = next(module for module in model.modules() if isinstance(module, QuantisedLinear))
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), layer(x))


@pytest.mark.parametrize("form", thinned(["w4a16", "w8a8", "nvfp4", "fp8-blocks"], keep=2))
def test_packed_copies_replace_the_codes(form: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    """The CPU library's results are those of torch, also with bfloat16 activations."""
    if load_native() is None:
        pytest.skip("no compiler here")
    source, _ = checkpoint_factory("mixtral", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS[form]())
    model = build_packed(tmp_path / "packed")
    load_weights(model, tmp_path / "packed", torch.float32, progress=False)
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    rows = {layer: x if layer.cuts[0].num_columns == 64 else x.repeat(1, 2)[:, :96] for layer in layers}
    before = {layer: layer(given) for layer, given in rows.items()}
    assert model.prepack()
    assert not any(layer.weight.numel() or layer.scales.numel() for layer in layers)
    for layer, given in rows.items():
        torch.testing.assert_close(layer(given), before[layer], rtol=1e-4, atol=1e-4)
        narrow = layer(given.bfloat16())
        assert narrow.dtype is torch.bfloat16
        assert float((narrow - before[layer]).norm() / before[layer].norm()) < 0.02


@pytest.mark.parametrize(("form", "triton"), [("awq", True), ("fp8-blocks", True), ("w8a8", False), ("nvfp4", False)])
def test_gpus_get_triton_products(form: str, triton: bool, checkpoint_factory: Factory, tmp_path: Path) -> None:
    """A layer without memory stands for one on a GPU: Triton refuses to launch, and torch computes the shape."""
    source, _ = checkpoint_factory("llama", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS[form]())
    model = build_packed(tmp_path / "packed", device="meta", rounds=True)
    config = EngineConfig(model=model.config, model_path="", load_format="dummy", max_model_len=48)
    fill_model(model, config, torch.float32, torch.device("meta"), progress=False)
    for layer in _quantised(model):
        x = torch.empty(3, layer.cuts[0].num_columns, device="meta")
        if not triton:
            assert layer(x).shape == (3, layer.scaled_weight().shape[0])
            continue
        with pytest.raises(RuntimeError, match="Triton kernels need"):
            layer(x)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_products_of_a_gpu_equal_those_of_a_cpu(form: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    source, _ = checkpoint_factory("qwen3", **SIZES, **HEADS)
    quantise_checkpoint(source, tmp_path, FORMATS[form]())
    on_gpu, on_cpu = (_quantised(load_packed(tmp_path / "packed", device=device)) for device in ("cuda", "cpu"))
    for layer, reference in zip(on_gpu, on_cpu, strict=True):
        for rows in (3, 70):
            x = torch.randn(rows, layer.cuts[0].num_columns).bfloat16()
            error = layer(x.cuda()).cpu().float() - (expected := reference(x.float()))
            assert float(error.norm() / expected.norm()) < 0.01


class TestRefusal:
    """One line that names the tensor, before or while weights are loaded."""

    LAYER = "model.layers.1.self_attn.q_proj"

    @pytest.fixture
    def edited(self, checkpoint_factory: Factory, tmp_path: Path) -> Callable[..., str]:
        source, _ = checkpoint_factory("llama", **SIZES)

        def edit(form: str, suffix: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> str:
            quantise_checkpoint(source, tmp_path, FORMATS[form]())
            file = tmp_path / "packed" / FILE
            tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
            name = f"{self.LAYER}.{suffix}"
            changed = change(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed.contiguous()
            save_file(tensors, file)
            with pytest.raises(ConfigError) as caught:
                load_packed(tmp_path / "packed")
            message = str(caught.value)
            assert name in message and "\n" not in message
            return message

        return edit

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_scales_that_are_not_positive(self, value: float, edited: Callable[..., str]) -> None:
        message = edited("w4a16", "weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), value))
        assert f"has a scale of {value:g}; scales must be positive and finite" in message

    @pytest.mark.parametrize(
        ("form", "suffix"),
        [
            ("w4a16", "weight_packed"),
            ("w4a16", "weight_scale"),
            ("w4a16-asymmetric", "weight_zero_point"),
            ("fp8-small-blocks", "weight_scale"),
            ("w8a8", "weight"),
            ("gptq", "qweight"),
            ("gptq", "g_idx"),
            ("gptq", "scales"),
            ("awq", "qweight"),
            ("awq", "qzeros"),
            ("nvfp4", "weight_scale"),
        ],
    )
    def test_wrong_shape(self, form: str, suffix: str, edited: Callable[..., str]) -> None:
        assert "but config.json requires" in edited(form, suffix, lambda t: t[:-1])

    def test_missing(self, edited: Callable[..., str]) -> None:
        assert "is missing" in edited("w4a16", "weight_scale", lambda _: None)

    def test_wrong_dtype(self, edited: Callable[..., str]) -> None:
        assert "has dtype I64; supported: I32" in edited("w4a16", "weight_packed", lambda t: t.long())

    def test_zero_points_and_groups_that_contradict_the_settings(self, edited: Callable[..., str]) -> None:
        message = edited("gptq", "qzeros", lambda t: t.index_fill(0, torch.tensor([1]), 0x12345678))
        assert "has other zero points than 8, but config.json has sym true" in message

    @pytest.mark.parametrize(
        ("form", "message"),
        [
            ("gptq", "config.json has no act-order: set desc_act"),
            ("gptq-act-order", "has groups from 0 to 7; the layer has groups 0 to 1"),
        ],
    )
    def test_wrong_groups(self, form: str, message: str, edited: Callable[..., str]) -> None:
        assert message in edited(form, "g_idx", lambda t: t.index_fill(0, torch.tensor([1]), 7))

    @pytest.mark.parametrize(("suffix", "value"), [("weight_scale", float("nan")), ("weight_global_scale", 0.0)])
    def test_scales_of_nvfp4(self, suffix: str, value: float, edited: Callable[..., str]) -> None:
        message = edited("nvfp4", suffix, lambda t: t.float().index_fill(0, torch.tensor([0]), value).to(t))
        assert f"has a scale of {value:g}; scales must be" in message

    def test_nan_in_fp8(self, edited: Callable[..., str]) -> None:
        message = edited("fp8-channel", "weight", lambda t: t.float().index_fill(0, torch.tensor(1), torch.nan).to(t))
        assert "has non-finite values in float8_e4m3fn" in message

    def test_group_that_does_not_divide(self, checkpoint_factory: Factory, tmp_path: Path) -> None:
        source, _ = checkpoint_factory("llama", **SIZES)
        quantise_checkpoint(source, tmp_path, FORMATS["w4a16"]())
        path = tmp_path / "packed" / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 40
        path.write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=r"self_attn\.q_proj: group_size 40 does not divide its 64 inputs"):
            build_packed(tmp_path / "packed")
