"""Selection of the attention backend, and all errors of it."""

import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator
from typing import Any

import fake_flash_attn
import fake_flashinfer
import pytest
import torch

from quire.kernels.common.triton_runtime import require_launchable
from quire.protocol.config import EngineConfig
from quire.protocol.errors import ConfigError
from quire.protocol.model.kv_layout import KVLayout, kv_layout
from quire.protocol.model.model_config import ModelConfig
from quire.protocol.model.vision_config import VisionConfig
from quire.worker_proc.attention import choose
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.attention.choose import pick_backend
from quire.worker_proc.attention.supports import HALVES, Needs, Supports

HOPPER, AMPERE, BLACKWELL, TURING = (9, 0), (8, 0), (10, 0), (7, 5)


def config_of(backend: str = "auto", **settings: Any) -> EngineConfig:
    """``settings``: fields of the model configuration if it has them, otherwise of the engine configuration."""
    of_model = {name: settings.pop(name) for name in list(settings) if name in ModelConfig.__struct_fields__}
    dtype = of_model.pop("dtype", "bfloat16")
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
           "num_kv_heads": 2, "head_dim": 64} | of_model,
    )  # fmt: skip
    given = {"device": "cuda", "dtype": dtype, "kv_cache_dtype": dtype, "max_model_len": 128} | settings
    return EngineConfig(model=model, model_path="", attention_backend=backend, **given)


def pick(
    config: EngineConfig, capability: tuple[int, int] | None = HOPPER, layout: KVLayout | None = None
) -> tuple[AttentionBackend, str]:
    """Return the backend and the one record that the choice logs."""
    layout = layout or kv_layout(config.model, config.block_size, config.kv_cache_dtype)
    on_cpu = config.device == "cpu"
    # There is no GPU to allocate on; the backends only need a device that is not a CPU.
    device = torch.device("cpu" if on_cpu else "meta")
    messages = queue.SimpleQueue[logging.LogRecord]()
    handler = logging.handlers.QueueHandler(messages)  # type: ignore[arg-type]
    choose.log.logger.addHandler(handler)
    choose.log.setLevel(logging.INFO)
    try:
        backend = pick_backend(config, layout, device, None if on_cpu else capability)
    finally:
        choose.log.setLevel(logging.NOTSET)
        choose.log.logger.removeHandler(handler)
    assert messages.qsize() == 1
    return backend, messages.get().message


@pytest.fixture
def launchable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make ``require_launchable`` accept this machine."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    require_launchable.cache_clear()
    yield
    require_launchable.cache_clear()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, launchable: None) -> None:
    """Install fakes of all attention libraries."""
    fake_flashinfer.install(monkeypatch)
    fake_flash_attn.install(monkeypatch)


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_cpu_backend_on_a_cpu(wanted: str) -> None:
    backend, said = pick(config_of(wanted, device="cpu"))
    assert backend.name == "cpu" and said.startswith('attention backend name="cpu (') and "the device is a CPU" in said


@pytest.mark.parametrize("wanted", ["triton", "flashinfer", "flash_attn"])
def test_gpu_backends_are_rejected_on_a_cpu(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {wanted} needs a GPU: use cpu or auto on a CPU"):
        pick(config_of(wanted, device="cpu"))


def test_triton_is_the_default_on_a_gpu(launchable: None) -> None:
    backend, said = pick(config_of())
    assert backend.name == "triton" and not backend.needs_host_lengths
    assert said.startswith('attention backend name=triton reason="the device is a GPU" ')
    assert said.endswith('graphs="steady decode uses CUDA graphs"')
    assert pick(config_of("triton"))[1].startswith("attention backend name=triton reason=requested ")


def test_log_line_has_the_reason_for_missing_graphs(launchable: None) -> None:
    assert pick(config_of(enforce_eager=True))[1].endswith('no CUDA graphs (--enforce-eager)"')
    backend, said = pick(config_of(deterministic=True))
    assert backend.needs_host_lengths
    assert "(fixed split of keys)" in said and "no CUDA graphs: the backend needs lengths on the host" in said


def test_triton_supports_features_that_the_libraries_lack(launchable: None) -> None:
    odd = {"head_dim": 80, "attention_sinks": True, "attention_soft_cap": 30.0, "windows": [8, 0], "block_size": 3}
    assert pick(config_of(**odd, dtype="float32", kv_cache_dtype="float8_e5m2"))[0].name == "triton"
    with pytest.raises(ConfigError, match=r"--attention-backend triton: does not support head_dim 640 \(.*up to 512\)"):
        pick(config_of(head_dim=640))
    with pytest.raises(
        ConfigError, match=r"compute capability 7\.5 \(supported: 8\.x and later\); no other backend is usable"
    ):
        pick(config_of(), TURING)


def test_cpu_backend_is_rejected_on_a_gpu() -> None:
    with pytest.raises(
        ConfigError, match="cpu needs --device cpu: use triton, flashinfer, flash_attn or auto on a GPU"
    ):
        pick(config_of("cpu"))


def test_error_has_the_reason_why_triton_cannot_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    require_launchable.cache_clear()
    with pytest.raises(ConfigError, match="--attention-backend triton: Triton kernels need the triton package"):
        pick(config_of())


def test_flashinfer_is_used_if_requested(libraries: None) -> None:
    """Also for a model whose images would attend in both directions, if it reads none."""
    backend, said = pick(config_of("flashinfer", kv_cache_dtype="float8_e4m3fn", windows=[8, 0], **BOTH_WAYS))
    assert backend.name == "flashinfer"
    assert said.startswith(
        'attention backend name="flashinfer (workspace 128 MiB; kernels are compiled when first used)" '
    )
    assert 'reason=requested graphs="no CUDA graphs: the backend needs lengths on the host' in said


def test_flash_attn_uses_the_version_for_the_gpu(libraries: None) -> None:
    hopper, ampere = pick(config_of("flash_attn")), pick(config_of("flash_attn"), AMPERE)
    assert 'name="flash_attn (flash-attn 3)" reason=requested graphs="steady decode uses CUDA graphs' in hopper[1]
    assert 'name="flash_attn (flash-attn 2)" reason=requested graphs="steady decode uses CUDA graphs' in ampere[1]
    assert hopper[0].name == ampere[0].name == "flash_attn"


def test_flash_attn_uses_the_installed_version(monkeypatch: pytest.MonkeyPatch, libraries: None) -> None:
    fake_flash_attn.install(monkeypatch, version_3=False)
    assert "(flash-attn 2)" in pick(config_of("flash_attn"))[1]
    with pytest.raises(ConfigError) as error:
        pick(config_of("flash_attn"), TURING)
    assert "flash-attn 3: does not support compute capability 7.5" in str(error.value)
    assert "flash-attn 2: does not support compute capability 7.5" in str(error.value)
    fake_flash_attn.install(monkeypatch, version_2=False, version_3=False)
    with pytest.raises(ConfigError) as error:
        pick(config_of("flash_attn"))
    assert "flash-attn 3: cannot load the library" in str(error.value)
    assert str(error.value).endswith("usable backends: triton, flashinfer")


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_missing_library(name: str, monkeypatch: pytest.MonkeyPatch, launchable: None) -> None:
    for module in ("flashinfer", "flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    extra = name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{name}: .*cannot load.*quire-serve\[{extra}\].*usable backends: triton$"):
        pick(config_of(name))


BOTH_WAYS = {"vision": VisionConfig("", 7, is_causal=False)}
REFUSALS = [
    ("flashinfer", {"head_dim": 80}, "head_dim 80 (supported: 64, 128, 256)"),
    ("flashinfer", {"attention_sinks": True}, "attention sinks"),
    ("flashinfer", {"chunks": [8192, 0]}, "chunked local attention"),
    ("flashinfer", BOTH_WAYS | {"encoder_cache_tokens": 8}, "attention in both directions inside images"),
    ("flashinfer", {"dtype": "float32"}, "--dtype float32 (supported: float16, bfloat16)"),
    ("flashinfer", {"kv_cache_dtype": "float16"}, "--kv-cache-dtype float16 with bfloat16 activations"),
    ("flashinfer", {"deterministic": True}, "batch-independent results (--deterministic)"),
    (
        "flash_attn",
        {"head_dim": 84},
        "flash-attn 3: does not support head_dim 84 (supported: multiples of 8 up to 256)",
    ),
    ("flash_attn", {"head_dim": 512}, "head_dim 512"),
    ("flash_attn", {"attention_sinks": True}, "attention sinks"),
    ("flash_attn", {"chunks": [8192, 0]}, "flash-attn 3: does not support chunked local attention"),
    ("flash_attn", BOTH_WAYS | {"encoder_cache_tokens": 8}, "attention in both directions inside images"),
    ("flash_attn", {"dtype": "float32"}, "--dtype float32"),
    ("flash_attn", {"kv_cache_dtype": "float8_e4m3fn"}, "--kv-cache-dtype float8_e4m3fn with bfloat16"),
    ("flash_attn", {"deterministic": True}, "batch-independent results"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSALS, ids=lambda x: str(x)[:40])
def test_feature_that_a_library_lacks_is_an_error_at_start(
    name: str, settings: dict[str, Any], words: str, libraries: None
) -> None:
    with pytest.raises(ConfigError) as error:
        pick(config_of(name, **settings))
    message = str(error.value)
    assert message.startswith(f"--attention-backend {name}: ") and words in message
    assert "usable backends: triton" in message


def test_scales_per_head_need_a_backend_that_supports_them(libraries: None) -> None:
    config = config_of("flashinfer", kv_cache_dtype="float8_e4m3fn")
    layout = kv_layout(config.model, config.block_size, config.kv_cache_dtype)
    with pytest.raises(ConfigError, match=r"flashinfer: does not support KV scales per head; usable backends: triton$"):
        choose.pick_backend(config, layout, torch.device("cuda"), (9, 0), head_scales=True)


def test_gpu_that_is_too_old_or_too_new(libraries: None) -> None:
    with pytest.raises(ConfigError, match=r"compute capability 7\.5 \(supported: 8\.x to 12\.x\)"):
        pick(config_of("flashinfer"), TURING)
    with pytest.raises(
        ConfigError, match=r"flash-attn 3: does not support compute capability 10\.0 \(supported: 9\.x\)"
    ):
        pick(config_of("flash_attn", head_dim=512), BLACKWELL)
    assert "(flash-attn 2)" in pick(config_of("flash_attn"), BLACKWELL)[1]


def test_error_lists_all_missing_features() -> None:
    nothing = Supports(
        dtypes=HALVES, fp8_cache=False, head_dims=(64,), windows=False, chunks=False,
        soft_cap=False, sinks=False, deterministic=False, last_keys=False, capabilities=(9, 9),
    )  # fmt: skip
    everything = Needs(
        head_dims=(80,), dtype=torch.float32, kv_dtype=torch.float8_e4m3fn, windows=True, chunks=True,
        soft_cap=True, sinks=True, deterministic=True, last_keys=True,
    )  # fmt: skip
    assert len(nothing.lacks(everything, AMPERE)) == 10
    assert Supports().lacks(everything, AMPERE) == []
    assert nothing.lacks(Needs(head_dims=(64,), dtype=HALVES[0], kv_dtype=HALVES[0]), HOPPER) == []
