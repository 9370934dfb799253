"""Quantised experts as one weight of all of them: loaded in place, and refused in forms that the kernel lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import convert_checkpoint
from inprocess import InProcessEngine
from packed_models import logits_of, prompts
from quantised_checkpoints import FORMATS, quantise_checkpoint
from thread_ranks import ThreadRank, on_ranks
from tiers import thinned

from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.options import parse_options
from quire.protocol.errors import ConfigError
from quire.protocol.model.checkpoint import stored_tensors, with_stored_format
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.models.decoder import Decoder
from quire.worker_proc.models.mlp import SparseMlp
from quire.worker_proc.models.ops import TorchOps
from quire.worker_proc.models.registry import build_model
from quire.worker_proc.startup import setup
from quire.worker_proc.startup.loader import load_weights

Factory = Callable[..., tuple[Path, Any]]

SIZES = {"hidden_size": 64, "intermediate_size": 96}


class StackingOps(TorchOps):
    """Wants one weight as the Triton operations do, and computes from each expert's part of its memory."""

    stacks_experts = True


def build(source: Path, parallel: ThreadRank | None = None) -> Decoder:
    config = with_stored_format(source, stored_tensors(source), load_model_config(source))
    return build_model(config, torch.float32, "cpu", ops=StackingOps(), parallel=parallel)


def loaded_logits(source: Path, parallel: ThreadRank | None = None) -> torch.Tensor:
    model = build(source, parallel)
    load_weights(model, source, torch.float32, progress=False)
    for layer in model.modules():
        if isinstance(layer, SparseMlp):
            assert layer.experts.stacked is not None
            for index, whole in enumerate(layer.experts.stacked):
                parts = [pair[index].scaled_weight().dequantise() for pair in layer.quantised]
                assert torch.equal(whole.dequantise(), torch.cat(parts))
    return logits_of(model)


@pytest.mark.parametrize("form", thinned(["w4a16-asymmetric", "w8a16", "fp8-blocks", "awq"], keep=2))
def test_weights_are_loaded_into_the_whole(form: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, _ = checkpoint_factory("mixtral", **SIZES)
    plain = quantise_checkpoint(source, tmp_path, FORMATS[form]())
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        expected = torch.cat([model(prompt[None]).logits[0] for prompt in prompts()])
        packed = tmp_path / "packed"
        for logits in (loaded_logits(packed), *on_ranks(2, lambda parallel: loaded_logits(packed, parallel))):
            assert float((logits - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ("w8a8", r"int8 in groups of 64 with activations rounded to int8"),
        ("nvfp4", r"fp4 in groups of 16"),
        ("gptq-act-order", r"their types differ"),
    ],
)
def test_forms_that_the_kernel_lacks_are_refused(
    form: str, found: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    source, _ = checkpoint_factory("mixtral", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS[form]())
    with pytest.raises(ConfigError, match=rf"^model\.layers\.0\.mlp\.experts: .*{found}.*supported on a GPU: int8"):
        build(tmp_path / "packed")


def _engine(folder: Path, device: str) -> InProcessEngine:
    model = make_engine_config(parse_options({}, "LLM"), folder=folder).model
    return InProcessEngine(folder, max_model_len=96, model=model, device=device)


def test_a_gpu_refuses_only_forms_that_the_kernel_lacks(
    checkpoint_factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start on a GPU, up to the first question to the device."""
    monkeypatch.setattr(setup, "pick_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(setup, "pick_ops", lambda *_: StackingOps())

    def asked(_: torch.device) -> tuple[int, int]:
        raise ConfigError("the model was built")

    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    source, _ = checkpoint_factory("mixtral", **SIZES)
    for form, message in (("awq", "the model was built"), ("w8a8", "supported on a GPU: int8")):
        quantise_checkpoint(source, tmp_path / form, FORMATS[form]())
        with pytest.raises(ConfigError, match=message):
            _engine(tmp_path / form / "packed", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["w4a16-asymmetric", "w8a16", "fp8-blocks", "awq"])
def test_tokens_of_a_gpu_equal_those_of_a_cpu(form: str, checkpoint_factory: Factory, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    source, _ = checkpoint_factory("mixtral", **SIZES)
    quantise_checkpoint(source, tmp_path, FORMATS[form]())
    answers = []
    for device in ("cpu", "cuda"):
        engine = _engine(tmp_path / "packed", device)
        for index, prompt in enumerate(prompts()):
            engine.add(str(index), prompt.tolist(), max_tokens=8)
        answers.append({name: answer.tokens for name, answer in engine.run().items()})
    assert answers[0] == answers[1]


def test_blocks_of_gguf_files_are_refused(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("mixtral", hidden_size=256, intermediate_size=512, head_dim=64)
    convert_checkpoint(source, tmp_path / "model.gguf", tmp_path / "plain", "Q4_K")
    with pytest.raises(ConfigError, match="types of GGUF files"):
        build(tmp_path / "model.gguf")
