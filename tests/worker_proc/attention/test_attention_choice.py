"""Which attention backend a worker gets, and every reason for which it does not start."""

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
from quire.worker_proc.attention import choose
from quire.worker_proc.attention.backend import AttentionBackend
from quire.worker_proc.attention.choose import pick_backend
from quire.worker_proc.attention.supports import HALVES, Needs, Supports

HOPPER, AMPERE, BLACKWELL, TURING = (9, 0), (8, 0), (10, 0), (7, 5)


def config_of(backend: str = "auto", **settings: Any) -> EngineConfig:
    """``settings``: of the engine, and of the model where that has a field of the name."""
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
    # Nothing can be made on a GPU that is not there; all that matters of the device is that it is not a CPU.
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
    """As where Triton can launch."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    require_launchable.cache_clear()
    yield
    require_launchable.cache_clear()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, launchable: None) -> None:
    """All there is, installed."""
    fake_flashinfer.install(monkeypatch)
    fake_flash_attn.install(monkeypatch)


@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_a_cpu_has_its_own(wanted: str) -> None:
    backend, said = pick(config_of(wanted, device="cpu"))
    assert backend.name == "cpu" and said.startswith('attention backend name="cpu (') and "the device is a CPU" in said


@pytest.mark.parametrize("wanted", ["triton", "flashinfer", "flash_attn"])
def test_a_cpu_has_no_other(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {wanted} needs a GPU; on a CPU there is: cpu"):
        pick(config_of(wanted, device="cpu"))


def test_a_gpu_gets_triton(launchable: None) -> None:
    backend, said = pick(config_of())
    assert backend.name == "triton" and not backend.needs_host_lengths
    assert said.startswith('attention backend name=triton reason="the device is a GPU" ')
    assert said.endswith('graphs="steady decode is replayed from CUDA graphs"')
    assert pick(config_of("triton"))[1].startswith('attention backend name=triton reason="asked for" ')


def test_the_line_says_why_there_are_no_graphs(launchable: None) -> None:
    assert pick(config_of(enforce_eager=True))[1].endswith('no CUDA graphs (--enforce-eager)"')
    backend, said = pick(config_of(deterministic=True))
    assert backend.needs_host_lengths
    assert "(keys in pieces of a fixed size)" in said and "launched kernel by kernel: no CUDA graphs" in said


def test_triton_serves_what_the_others_do_not(launchable: None) -> None:
    odd = {"head_dim": 80, "attention_sinks": True, "attention_soft_cap": 30.0, "windows": [8, 0], "block_size": 3}
    assert pick(config_of(**odd, dtype="float32", kv_cache_dtype="float8_e5m2"))[0].name == "triton"
    with pytest.raises(ConfigError, match=r"--attention-backend triton: it has no head_dim 640 \(.*up to 512\)"):
        pick(config_of(head_dim=640))
    with pytest.raises(
        ConfigError, match=r"compute capability 7\.5 \(it has 8\.x and later\); nothing else fits here either"
    ):
        pick(config_of(), TURING)


def test_cpu_is_no_backend_of_a_gpu() -> None:
    with pytest.raises(ConfigError, match="cpu needs --device cpu; on a GPU there are: triton, flashinfer, flash_attn"):
        pick(config_of("cpu"))


def test_triton_where_nothing_launches_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    require_launchable.cache_clear()
    with pytest.raises(ConfigError, match="--attention-backend triton: Triton kernels need the triton package"):
        pick(config_of())


def test_flashinfer_is_taken_when_asked_for(libraries: None) -> None:
    backend, said = pick(config_of("flashinfer", kv_cache_dtype="float8_e4m3fn", windows=[8, 0]))
    assert backend.name == "flashinfer"
    assert said.startswith(
        'attention backend name="flashinfer (workspace 128 MiB; kernels are compiled when first used)" '
    )
    assert '"asked for" graphs="it is planned from lengths on the host' in said


def test_flash_attn_takes_the_version_that_fits(libraries: None) -> None:
    hopper, ampere = pick(config_of("flash_attn")), pick(config_of("flash_attn", block_size=256), AMPERE)
    assert 'name="flash_attn (flash-attn 3)" reason="asked for" graphs="steady decode is replayed' in hopper[1]
    assert "flash_attn (flash-attn 2): asked for; steady decode is replayed" in ampere[1]
    assert hopper[0].name == ampere[0].name == "flash_attn"


def test_flash_attn_falls_back_to_the_version_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, libraries: None
) -> None:
    fake_flash_attn.install(monkeypatch, version_3=False)
    assert "(flash-attn 2)" in pick(config_of("flash_attn", block_size=512))[1]
    with pytest.raises(ConfigError) as error:
        pick(config_of("flash_attn"))
    assert "flash-attn 3 is not usable here" in str(error.value)
    assert "flash-attn 2: it has no KV blocks of 16 tokens (it has multiples: --block-size 256)" in str(error.value)
    assert str(error.value).endswith("what fits here: triton, flashinfer")


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_a_library_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch, launchable: None) -> None:
    for module in ("flashinfer", "flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    extra = name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{name}: .*not usable here.*quire\[{extra}\].*what fits here: triton$"):
        pick(config_of(name, block_size=256))


REFUSALS = [
    ("flashinfer", {"head_dim": 80}, "no head_dim 80 (it has 64, 128, 256)"),
    ("flashinfer", {"attention_sinks": True}, "no attention sinks"),
    ("flashinfer", {"dtype": "float32"}, "no --dtype float32 (it has float16, bfloat16)"),
    ("flashinfer", {"kv_cache_dtype": "float16"}, "no --kv-cache-dtype float16 under bfloat16 activations"),
    ("flashinfer", {"deterministic": True}, "no equal bits whatever else runs (--deterministic)"),
    ("flash_attn", {"head_dim": 84}, "flash-attn 3: it has no head_dim 84 (it has multiples of 8 up to 256)"),
    ("flash_attn", {"head_dim": 512}, "no head_dim 512"),
    ("flash_attn", {"attention_sinks": True}, "no attention sinks"),
    ("flash_attn", {"dtype": "float32"}, "no --dtype float32"),
    ("flash_attn", {"kv_cache_dtype": "float8_e4m3fn"}, "no --kv-cache-dtype float8_e4m3fn under bfloat16"),
    ("flash_attn", {"deterministic": True}, "no equal bits whatever else runs"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSALS, ids=lambda x: str(x)[:40])
def test_what_a_library_has_not_is_refused_before_the_start(
    name: str, settings: dict[str, Any], words: str, libraries: None
) -> None:
    with pytest.raises(ConfigError) as error:
        pick(config_of(name, **settings))
    message = str(error.value)
    assert message.startswith(f"--attention-backend {name}: ") and words in message
    assert "what fits here: triton" in message


def test_an_old_gpu_or_one_too_new(libraries: None) -> None:
    with pytest.raises(ConfigError, match=r"no compute capability 7\.5 \(it has 8\.x to 12\.x\)"):
        pick(config_of("flashinfer"), TURING)
    with pytest.raises(ConfigError, match=r"flash-attn 3: it has no compute capability 10\.0 \(it has 9\.x\)"):
        pick(config_of("flash_attn"), BLACKWELL)
    assert pick(config_of("flash_attn", block_size=256), BLACKWELL)[0].name == "flash_attn"


def test_everything_that_is_missing_is_said_at_once() -> None:
    nothing = Supports(
        dtypes=HALVES, fp8_cache=False, head_dims=(64,), block_multiple=256, windows=False,
        soft_cap=False, sinks=False, deterministic=False, capabilities=(9, 9),
    )  # fmt: skip
    everything = Needs(
        head_dim=80, dtype=torch.float32, kv_dtype=torch.float8_e4m3fn, block_sizes=(16, 32), windows=True,
        soft_cap=True, sinks=True, deterministic=True,
    )  # fmt: skip
    assert len(nothing.lacks(everything, AMPERE)) == 10
    assert Supports().lacks(everything, AMPERE) == []
    assert nothing.lacks(Needs(head_dim=64, dtype=HALVES[0], kv_dtype=HALVES[0], block_sizes=(512,)), HOPPER) == []
