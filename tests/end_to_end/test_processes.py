"""Real processes over real sockets: the offline API, and the failure of a process."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoints import greedy_tokens
from engine_processes import engine_processes
from lent_engines import TINY
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.launch import cli
from quire.protocol.errors import ConfigError, InvalidRequest

QUIRE = [sys.executable, "-P", "-m", "quire.launch.cli"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(checkpoint_factory: Callable[..., tuple[Path, Any]]) -> tuple[Path, Any]:
    return checkpoint_factory("qwen3")


@pytest.fixture
def llm(tiny: tuple[Path, Any], lend: Callable[..., LLM]) -> LLM:
    return lend(tiny[0], **TINY)


def _generate(model: Any, prompt: list[int], n: int) -> list[int]:
    return greedy_tokens(model, [prompt], n)[0]


class TestOffline:
    def test_greedy_tokens_equal_transformers(self, llm: LLM, tiny: tuple[Path, Any]) -> None:
        prompts = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(3, 60)), [7]]
        outputs = llm.generate(prompts, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [_generate(tiny[1], p, 12) for p in prompts]
        assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
        assert [o.prompt_token_ids for o in outputs] == prompts

    def test_a_batch_larger_than_the_pool_is_preempted_and_correct(self, llm: LLM, tiny: tuple[Path, Any]) -> None:
        prompts = [[i, i + 1, i + 2] * 7 for i in range(3, 27)]
        before = llm.statistics()
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(prompts, params, priority=[i % 5 - 2 for i in range(len(prompts))])
        after = llm.statistics()
        assert after.num_preemptions > before.num_preemptions and all(output.finished for output in outputs)
        assert after.num_free_blocks == after.num_usable_blocks == 40
        assert all(type(value) is int for value in after.values())
        for i in (0, 11, 23):
            assert outputs[i].outputs[0].token_ids == _generate(tiny[1], prompts[i], 40)

    def test_a_repeated_prompt_hits_the_prefix_cache(self, llm: LLM) -> None:
        prompt = {"prompt_token_ids": [5, 4, 3, 2] * 8}
        first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert again.num_cached_tokens >= 24
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert llm.statistics()["prefix_cache_hit_tokens"] >= 24
        skipping = replace(GREEDY, skip_reading_prefix_cache=True)
        whole = llm.generate(prompt, skipping)[0]
        assert whole.num_cached_tokens == 0 and whole.outputs[0].token_ids == first.outputs[0].token_ids
        assert llm.reset_prefix_cache()
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0

    def test_logprobs(self, llm: LLM) -> None:
        output = llm.generate([3, 5, 8], SamplingParams(temperature=0.0, max_tokens=4, logprobs=3))[0].outputs[0]
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        for token, found in zip(output.token_ids, output.logprobs, strict=True):
            assert len(found) == 3 and found[token].rank == 1
            assert found[token].logprob == max(entry.logprob for entry in found.values())
        assert output.cumulative_logprob == pytest.approx(
            sum(f[t].logprob for t, f in zip(output.token_ids, output.logprobs, strict=True))
        )

    def test_a_stop_token_ends_the_answer(self, llm: LLM) -> None:
        free = llm.generate([6, 6, 6], GREEDY)[0].outputs[0].token_ids
        stop = free[3]
        output = llm.generate([6, 6, 6], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop]))[0]
        assert output.outputs[0].token_ids == free[: free.index(stop) + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [([], "prompt"), ([97], "prompt"), ([-1], "prompt"), ([1] * 128, "prompt"), ("text", "prompt"), ({}, "prompt")],
    )
    def test_a_bad_prompt_is_refused_and_the_next_one_served(self, llm: LLM, prompt: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([prompt] if prompt == [] else prompt, GREEDY)
        assert caught.value.param == param
        assert len(llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids) == 12

    def test_an_unknown_keyword_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
            LLM(max_num_seq=3)


@pytest.fixture
def others() -> set[int]:
    """The processes of engines that other tests keep running."""
    return {p.pid for p in engine_processes()}


class TestDeath:
    @pytest.mark.full
    @pytest.mark.parametrize("module", ["quire.worker_proc", "quire.scheduler_proc"])
    def test_a_killed_process_costs_no_token_and_leaves_no_process(
        self, tiny: tuple[Path, Any], others: set[int], module: str
    ) -> None:
        with LLM(tiny[0], num_gpu_blocks_override=40) as llm:
            before = llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
            victim = next(p for p in engine_processes() if p.pid not in others and module in p.cmdline())
            victim.send_signal(signal.SIGKILL)
            assert llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids == before
        assert {p.pid for p in engine_processes()} == others

    @pytest.mark.full
    def test_a_worker_that_cannot_load_reports_why(self, tiny: tuple[Path, Any], others: set[int]) -> None:
        with pytest.raises(ConfigError, match=r"memory does not suffice.*--kv-cache-memory-bytes"):
            LLM(tiny[0], kv_cache_memory_bytes=2**49)
        assert {p.pid for p in engine_processes()} == others

    @pytest.mark.full
    def test_children_die_with_a_killed_supervisor(self, tiny: tuple[Path, Any]) -> None:
        code = (
            "import sys, time\nfrom quire import LLM\n"
            f"llm = LLM({str(tiny[0])!r}, num_gpu_blocks_override=40)\n"
            "print(llm._engine.supervisor.directory, flush=True)\ntime.sleep(60)"
        )
        parent = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        directory = Path(parent.stdout.readline().strip())
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        _, alive = psutil.wait_procs(children, timeout=2)
        assert not alive
        assert not directory.exists()


class TestTerminal:
    @pytest.mark.full
    def test_only_the_answer_is_on_stdout(self) -> None:
        command = [*QUIRE, "chat", "--prompt", "Tell me a story.", "--max-tokens", "200"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1 and done.stdout.strip().endswith((".", "!", "?"))

    @pytest.mark.parametrize(
        ("arguments", "status", "words"),
        [
            (["serve", "--max-num-seq", "4"], 2, ["--max-num-seq", "did you mean --max-num-seqs"]),
            (["serve", "--block-size", "0"], 78, ["--block-size", "from 1 to 1024"]),
            (["serve", "--port", "70000"], 78, ["--port", "65535"]),
            (["serve", "/nonexistent"], 78, ["/nonexistent"]),
            (["serve", "--max-num-batched-tokens", "8"], 78, ["--max-num-batched-tokens", "from 64"]),
            (["generate", "--prompt", "x", "--temperature", "nan"], 1, ["temperature", "from 0 to 2"]),
            (["frobnicate"], 2, ["frobnicate", "serve"]),
        ],
    )
    def test_an_invalid_command_line_is_reported_in_one_line(
        self, arguments: list[str], status: int, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        shown = capsys.readouterr().err
        assert (ended.value.code, shown.count("\n")) == (status, 1)
        assert all(word in shown for word in words), shown

    def test_a_refusal_is_the_exit_status_of_the_process(self) -> None:
        done = subprocess.run([*QUIRE, "serve", "--block-size", "0"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr.count("\n")) == (78, 1)

    @pytest.mark.full
    def test_a_broken_checkpoint_is_refused_before_any_process_starts(
        self, tiny: tuple[Path, Any], tmp_path: Path
    ) -> None:
        for file in tiny[0].iterdir():
            whole = file.read_bytes()
            (tmp_path / file.name).write_bytes(whole[:9000] if file.suffix == ".safetensors" else whole)
        done = subprocess.run([*QUIRE, "serve", str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 78
        assert "model.safetensors" in done.stderr and "truncated" in done.stderr
        assert done.stderr.count("\n") == 1

    @pytest.mark.full
    def test_a_tensor_that_a_worker_refuses_is_reported_in_one_line(
        self, tiny: tuple[Path, Any], tmp_path: Path
    ) -> None:
        tensors = load_file(tiny[0] / "model.safetensors")
        tensors["model.norm.weight"][3] = torch.nan
        shutil.copytree(tiny[0], tmp_path / "model")
        save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
        done = subprocess.run([*QUIRE, "serve", str(tmp_path / "model")], capture_output=True, text=True, timeout=60)
        assert done.returncode == 78
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("quire: error: "))
        assert "tensor model.norm.weight has non-finite values" in line
