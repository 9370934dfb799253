"""Models that transformers computes, in real processes: answers over HTTP whose worker is killed; the offline API.

In the slow tier, because each worker and its successor import transformers.
"""

import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from checkpoints import greedy_tokens
from served import Served
from tiny_models import make_tiny
from tokenizers import Tokenizer
from waits import wait_for

from quire import LLM, SamplingParams
from quire.launch import cli
from quire.launch.config.model_folder import DEMO_MODEL

pytestmark = pytest.mark.slow

# fmt: off
FAMILIES = (
    "apertus", "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "falcon_h1", "gemma3n_text",
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granitemoehybrid", "hunyuan_v1_dense", "jetmoe", "lfm2", "minimax_m2",
    "nemotron", "nemotron_h", "olmo", "opt", "persimmon", "phi", "qwen3_next", "starcoder2",
)
# fmt: on
SIZES = {"vocab_size": 1024, "vocab_size_per_layer_input": 1024}
PROMPT = [5 + 37 * i % 900 for i in range(40)]
NUM_TOKENS = 160


def save(folder: Path, family: str) -> Any:
    model = make_tiny(folder, family, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return model


@pytest.mark.parametrize("family, ranks", [*((family, 1) for family in FAMILIES), ("gpt_neox", 2)])
def test_an_answer_outlives_its_worker(family: str, ranks: int, tmp_path: Path) -> None:
    model = save(tmp_path, family)
    flags = ["--model-impl", "transformers", "--block-size", "8", "--tensor-parallel-size", str(ranks)]
    server = Served(str(tmp_path), "--served-model-name", "tiny", *flags)
    worker = server.victims("worker")[0]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=300) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 40:
                worker.kill()
            if line.startswith('data: {"'):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
    wait_for(lambda: not worker.is_running(), 60)
    again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["choices"][0]["text"]
    server.end()
    (tokens,) = greedy_tokens(model, [PROMPT], NUM_TOKENS)
    assert text == again == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(tokens)


@pytest.mark.parametrize("implementation", ["transformers", "native"])
def test_the_offline_api(implementation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log probabilities of prompts, host memory and disk behind a small pool, sessions, forks, vectors, and a trace."""
    model, trace = save(tmp_path / "model", "deepseek_v3"), tmp_path / "trace.jsonl"
    prompts = [[5 + (7 * i + 11 * n) % 900 for i in range(40)] for n in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    wanted = [greedy_tokens(model, [prompt], 8)[0] for prompt in prompts]
    with torch.inference_mode():
        whole = model(torch.tensor(prompts[:1]), output_hidden_states=True)
    sizes: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 20}
    tiers: dict[str, Any] = {"cpu_offload_bytes": 2**20, "ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": 2**23}
    sizes["model_impl"] = implementation
    with LLM(tmp_path / "model", dtype="float32", pooling="last", trace=str(trace), **sizes, **tiers) as llm:
        outputs = [llm.generate([prompt], scored)[0] for prompt in prompts]
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        entries = outputs[0].prompt_logprobs
        found = [entry[token].logprob for token, entry in zip(prompts[0][1:], entries[1:], strict=True)]
        logprobs = whole.logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(found, logprobs[torch.arange(39), torch.tensor(prompts[0][1:])], atol=1e-4)
        again = [llm.generate([prompt], greedy)[0] for prompt in prompts]
        assert [output.outputs[0].token_ids for output in again] == wanted
        assert llm.statistics()["host_num_loaded"] > 0 == llm.statistics()["host_num_failed"]
        vector, hidden = llm.embed([prompts[0]])[0].outputs.embedding, whole.hidden_states[-1][0, -1]
        np.testing.assert_allclose(vector, hidden / hidden.norm(), atol=1e-5)
        with llm.session() as session:
            first = session.generate(prompts[0], greedy).outputs[0].token_ids
            second = session.generate([300, 301], greedy).outputs[0].token_ids
        assert first + second == wanted[0] + greedy_tokens(model, [prompts[0] + first + [300, 301]], 8)[0]
        root = llm.start(prompts[1], SamplingParams(seed=3, max_tokens=60, ignore_eos=True))
        known = root.read(7).token_ids[:7]
        (child,) = llm.fork(root, 1, num_tokens=7, seed=9, sampling_params=greedy)
        assert child.read().token_ids[7:] == greedy_tokens(model, [prompts[1] + known], 8)[0][:1]
        root.abort()
    cli.main(["replay", str(trace)])
    assert "all decisions are equal" in capsys.readouterr().out


def test_dummy_weights(tmp_path: Path) -> None:
    save(tmp_path, "deepseek_v3")
    (tmp_path / "model.safetensors").unlink()
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 20}
    with LLM(tmp_path, load_format="dummy", model_impl="transformers", **sizes) as llm:
        first, second = (llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True, seed=1)) for _ in "ab")
        assert first[0].outputs[0].token_ids == second[0].outputs[0].token_ids
