"""GGUF files against transformers with the weights that their blocks define, on one and two ranks; and damaged ones."""

import contextlib
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import BLOCKS, convert_checkpoint, tokenizer_settings, write_gguf
from inprocess import InProcessEngine
from packed_models import build_packed, load_packed, logits_of, prompts, resident_bytes
from thread_ranks import on_ranks
from tiers import thinned

from quire.frontend.text.text_in import TextIn
from quire.kernels.common.block_weight import BLOCK_TYPES, dequantise_blocks
from quire.kernels.cpu.native.library import load_native
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import parse_options
from quire.protocol.errors import ConfigError
from quire.protocol.model import gguf_file
from quire.protocol.model.checkpoint import check_sizes, stored_tensors
from quire.protocol.model.gguf_file import read_gguf
from quire.protocol.model.model_config import load_model_config
from quire.worker_proc.startup.loader import fill_model

Factory = Callable[..., tuple[Path, Any]]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CASES = [("llama", kind, "") for kind in ("F32", "F16", "BF16", *BLOCKS)]
OTHERS = [("qwen2", "Q4_0", "Q8_0"), ("qwen3", "Q4_K", "Q6_K"), ("gemma2", "Q4_1", "Q8_0"), ("gemma2", "Q5_K", "F16")]
OTHERS += [("qwen3_moe", "Q4_K", "Q6_K"), ("qwen3_moe", "BF16", "Q8_0"), ("mixtral", "Q4_0", "Q5_K")]
OTHERS += [("mixtral", "F16", ""), *((family, kind, "") for family in ("qwen3", "gemma2") for kind in BLOCKS)]
CASES += thinned(OTHERS, keep=6)
EXPERTS = {"decoder_sparse_step": 1, "moe_intermediate_size": 512, "norm_topk_prob": True}
"""GGUF files have experts in every layer and scale the weights of the chosen ones to sum to 1."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _reference(plain: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize(("family", "kind", "other"), CASES)
def test_logits_equal_transformers_on_one_and_two_ranks(
    family: str, kind: str, other: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    # GGUF files do not have the scale of scores: it follows from the size of the model.
    scale = {"query_pre_attn_scalar": 64} if family == "gemma2" else {}
    source, _ = checkpoint_factory(family, **SIZES, **scale, **(EXPERTS if family == "qwen3_moe" else {}))
    file, plain = tmp_path / "model.gguf", tmp_path / "plain"
    convert_checkpoint(source, file, plain, kind, other)
    reference = _reference(plain)
    expected = torch.cat([reference(prompt[None]).logits[0] for prompt in prompts()])
    for logits in (logits_of(load_packed(file)), *on_ranks(2, lambda parallel: logits_of(load_packed(file, parallel)))):
        assert float((logits - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("tied", thinned([True, False], keep=1))
def test_resident_weights_are_at_most_a_twentieth_larger_than_the_file(
    tied: bool, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    """In GGUF files of all types, and in the folder with bfloat16 weights that they are made from."""
    source, _ = checkpoint_factory("llama", **SIZES, vocab_size=992, tie_word_embeddings=tied, dtype=torch.bfloat16)
    models = [source]
    for kind in ("F16", "BF16", *BLOCKS):
        models.append(tmp_path / f"{kind}.gguf")
        convert_checkpoint(source, models[-1], tmp_path / kind, kind)
    for path in models:
        config = make_engine_config(parse_options({}, "LLM"), folder=path)
        model = build_packed(path, dtype=torch.bfloat16)
        fill_model(model, config, torch.bfloat16, torch.device("cpu"), progress=False)
        stored = sum(tensor.num_bytes for tensor in stored_tensors(path).values())
        assert 0.95 * stored <= resident_bytes(model) <= 1.05 * stored, path.name


def test_an_engine_reads_everything_from_the_file(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    file, plain = tmp_path / "tiny.gguf", tmp_path / "plain"
    convert_checkpoint(source, file, plain, "Q8_0", "Q4_1")
    config = make_engine_config(parse_options({}, "LLM"), folder=find_model(str(file)))
    assert config.model.eos_token_ids == [0]
    text_in = TextIn.load(file)
    assert text_in.tokenizer is not None and text_in.template is not None
    assert text_in.encode("hello h") == [1, 96, 2, 74]
    assert text_in.tokenizer.decode([96, 2, 74]) == "hello h"
    assert text_in.tokenizer_info["eos_token"] == "<end>"
    engine = InProcessEngine(file, max_model_len=96, model=config.model)
    prompt = prompts()[0].tolist()
    engine.add("0", prompt, max_tokens=8, ignore_eos=True)
    tokens = _reference(plain).generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None)
    assert engine.run()["0"].tokens == tokens[0, len(prompt) :].tolist()


@pytest.mark.skipif(load_native() is None, reason="no compiler here")
def test_fused_layers_of_mixed_types_are_recorded(checkpoint_factory: Factory, tmp_path: Path) -> None:
    """Usual files have values and down projections in another type than queries, keys, gates and ups."""
    source, _ = checkpoint_factory("llama", **SIZES)
    file = tmp_path / "mixed.gguf"
    convert_checkpoint(source, file, tmp_path / "plain", "Q4_K", "Q6_K")
    config = make_engine_config(parse_options({}, "LLM"), folder=find_model(str(file)))
    tokens = []
    for eager in (True, False):
        engine = InProcessEngine(file, max_model_len=96, model=config.model, enforce_eager=eager)
        engine.add("0", prompts()[0].tolist(), max_tokens=8)
        engine.add("1", prompts()[1].tolist(), max_tokens=12)
        tokens.append({name: answer.tokens for name, answer in engine.run().items()})
        assert (len(engine.runner.passes) > 0) is not eager
    assert tokens[0] == tokens[1]


def test_a_file_without_a_tokenizer_takes_token_ids(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    file = tmp_path / "tiny.gguf"
    convert_checkpoint(source, file, tmp_path / "plain", "Q8_0", with_tokenizer=False)
    assert TextIn.load(file).tokenizer is None
    assert make_engine_config(parse_options({}, "LLM"), folder=file).model.vocab_size == 97


def test_sentence_piece_merges_follow_the_scores(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "c", "ab", "bc", "\u2581abc", "abc", "<0x64>"]
    scores = [0.0, 0.0, 0.0, -9.0, -10.0, -11.0, -12.0, -2.0, -1.0, -4.0, -3.0, 0.0]
    settings = tokenizer_settings() | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 6],
        "tokenizer.ggml.unknown_token_id": 0,
        "general.architecture": "llama",
    }
    file = tmp_path / "model.gguf"
    write_gguf(file, settings, {})
    text_in = TextIn.load(file)
    assert text_in.tokenizer is not None
    assert text_in.encode("abc") == [1, 9]
    assert text_in.encode("ab d") == [1, 3, 7, 3, 11]
    assert text_in.tokenizer.decode([3, 7, 3, 11]) == "ab d"


@pytest.mark.parametrize(("kind", "header"), [("Q5_0", 2), ("Q5_1", 4)])
def test_fifth_bits_lie_in_a_word(kind: str, header: int) -> None:
    """Types that files of K types have where 256 does not divide the inputs; transformers does not read them."""
    generator = torch.Generator().manual_seed(5)
    block = torch.randint(0, 256, (header + 20,), dtype=torch.uint8, generator=generator)
    block[:header] = torch.tensor([0.25, -1.5])[: header // 2].half().view(torch.uint8)
    octets = block.tolist()
    word = int.from_bytes(bytes(octets[header : header + 4]), "little")
    low = octets[header + 4 :]
    codes = [((low[i] & 15) if i < 16 else (low[i - 16] >> 4)) + 16 * (word >> i & 1) for i in range(32)]
    expected = [0.25 * (code - 16) if kind == "Q5_0" else 0.25 * code - 1.5 for code in codes]
    assert dequantise_blocks(kind, block[None]).tolist() == [expected]


def _whole(tmp_path: Path) -> bytes:
    file = tmp_path / "whole.gguf"
    data = bytes(97 * 32 * 4)
    write_gguf(file, {"general.architecture": "llama"}, {"token_embd.weight": ("F32", (97, 32), data)})
    return file.read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is not a GGUF file: it is empty"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + b"\x01" + data[5:], "version 1 is not supported; supported: 2 and 3"),
        (lambda data: data[:-1], "tensor token_embd.weight ends at byte"),
        (lambda data: data[:40], "its header does not fit the file"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "18446744073709551615 tensors"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "18446744073709551615 settings"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "its header does not fit the file"),
        (
            lambda data: data.replace(b"llama", b"mamba"),
            "'mamba' is not supported in GGUF files; supported: llama, qwen2",
        ),
    ],
)
def test_damaged_files_are_refused_with_one_line(
    damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(_whole(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        stored_tensors(file)
        load_model_config(file)
    assert message in str(caught.value) and "\n" not in str(caught.value) and "model.gguf" in str(caught.value)


def test_a_missing_file_is_not_taken_for_a_name_on_the_hub() -> None:
    with pytest.raises(ConfigError, match=r"^GGUF file models/missing\.gguf not found$"):
        find_model("models/missing.gguf")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("IQ9", (97, 32), b""), "has type number 99; supported: F32, F16, BF16, Q4_0"),
        (("Q8_0", (97, 33), b""), "the last dimension must be a multiple of 32"),
        (("F32", (2**40, 2**40), b""), "has shape"),
        (("Q8_0", (2, 2, 32), bytes(136)), "has type Q8_0 and 3 dimensions"),
    ],
)
def test_unusable_tensors_are_refused_by_name(tensor: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, {"general.architecture": "llama"}, {"token_embd.weight": tensor})
    with pytest.raises(ConfigError, match=message):
        stored_tensors(file)


@pytest.mark.parametrize(("count", "shape"), [(4, (3, 2, 32)), (4, (4, 64)), (None, (4, 2, 32)), ("4", (4, 2, 32))])
def test_experts_that_are_not_declared_are_refused(count: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    declared = {} if count is None else {"qwen3moe.expert_count": count}
    tensor = ("Q8_0", shape, bytes(torch.Size(shape).numel() // 32 * 34))
    write_gguf(file, {"general.architecture": "qwen3moe", **declared}, {"blk.0.ffn_up_exps.weight": tensor})
    with pytest.raises(ConfigError, match=r"model\.gguf: tensor blk\.0\.ffn_up_exps\.weight has shape"):
        stored_tensors(file)


def test_experts_of_other_architectures_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, {"general.architecture": "qwen2", "qwen2.expert_count": 4}, {})
    with pytest.raises(
        ConfigError, match="experts are not supported in GGUF files of qwen2; supported: llama, qwen3moe"
    ):
        load_model_config(file)


@pytest.mark.parametrize("name", ["general.architecture", "llama.embedding_length", "llama.rope.scaling.type"])
def test_settings_of_wrong_types_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    settings = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.head_count": 2}
    for value in (["llama"], -1):
        write_gguf(file, settings | {name: value}, {"token_embd.weight": ("F32", (97, 64), bytes(97 * 64 * 4))})
        with pytest.raises(ConfigError, match=r"model\.gguf"):
            load_model_config(file)


def _header(settings: Sequence[tuple[int, bytes]], num_tensors: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(settings))
    return head + b"".join(struct.pack("<Q8sI", 8, b"%08d" % i, kind) + data for i, (kind, data) in enumerate(settings))


TEXT, ARRAY, UINT16 = 8, 9, 2
MIB = 2**20
ODD_TEXT = "\U0001f600".encode() + b"a" * (MIB - 4)
"""Each of its characters takes four bytes as an object."""
HEADERS: dict[str, bytes] = {
    "numbers": _header([(ARRAY, struct.pack("<IQ", UINT16, MIB) + b"\x01\x7f" * MIB)] * 8),
    "short texts": _header([(ARRAY, struct.pack("<IQ", TEXT, 2**18) + struct.pack("<Q2s", 2, b"ab") * 2**18)]),
    "texts": _header([(TEXT, struct.pack("<Q", MIB) + ODD_TEXT)] * 8),
    "long text": _header([(TEXT, struct.pack("<Q", 8 * MIB) + ODD_TEXT * 8)]),
    "settings": _header([(0, b"\0")] * 4096),
    "name": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 8 * MIB) + ODD_TEXT * 8,
    "tensors": _header([], 2**15)
    + b"".join(struct.pack("<Q8sIQIQ", 8, b"%08d" % i, 1, 8, 0, 32 * i) for i in range(2**15))
    + bytes(2**20 + 16),
}


@pytest.mark.parametrize(
    "data",
    [pytest.param(data, id=name, marks=[pytest.mark.full] * (name == "tensors")) for name, data in HEADERS.items()],
)
def test_a_header_takes_at_most_four_times_its_size_in_memory(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    with contextlib.suppress(ConfigError):
        read_gguf(file)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 4 * len(data) + 16 * MIB


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges", "model", "pre", "bos_token_id", "eos_token_id"])
def test_tokenizers_of_wrong_types_are_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for value in ([7], "x", -1):
        settings = {"general.architecture": "llama", **tokenizer_settings(), f"tokenizer.ggml.{key}": value}
        write_gguf(file, settings, {})
        with pytest.raises(ConfigError, match=r"model\.gguf"):
            TextIn.load(file)


def test_scales_that_are_not_finite_are_refused(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    file = tmp_path / "model.gguf"
    convert_checkpoint(source, file, tmp_path / "plain", "Q8_0")
    tensor = stored_tensors(file)["model.layers.1.mlp.down_proj.weight"]
    assert tensor.gguf is not None
    data = bytearray(file.read_bytes())
    data[tensor.gguf.start : tensor.gguf.start + 2] = b"\x00\x7e"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_down\.weight has scales that are not finite"):
        load_packed(file)


def test_sizes_are_those_of_the_settings(checkpoint_factory: Factory, tmp_path: Path) -> None:
    source, _ = checkpoint_factory("llama", **SIZES)
    file = tmp_path / "model.gguf"
    convert_checkpoint(source, file, tmp_path / "plain", "Q8_0")
    check_sizes(file, stored_tensors(file), load_model_config(file))


def test_the_tables_of_blocks_agree() -> None:
    assert {kind: gguf_file.BLOCKS[kind][1] for kind in gguf_file.QUANTISED} == {
        kind: size for kind, (size, _, _) in BLOCK_TYPES.items()
    }
