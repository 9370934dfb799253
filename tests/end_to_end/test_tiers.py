"""Real processes with host memory and a disk behind the prefix cache, which outlive workers and engines."""

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from engine_processes import engine_processes, processes_of
from own_costs import OwnCosts
from served import Served

from quire import LLM, SamplingParams
from quire.protocol.errors import QuireError

pytestmark = pytest.mark.full

RNG = random.Random(7)
PROMPTS = [[RNG.randrange(3, 90) for _ in range(64)] for _ in range(14)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 60}
NO_DISK: dict[str, Any] = {"ssd_cache_dir": "", "ssd_cache_bytes": 0}


def answers(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Return the tokens of the prompts, generated one by one, and the number of cached tokens of all."""
    outputs = []
    for prompt in prompts:
        outputs += llm.generate([list(prompt)], GREEDY, use_tqdm=False)
        _wait_for_stores(llm)
    return [list(output.outputs[0].token_ids) for output in outputs], sum(o.num_cached_tokens for o in outputs)


def complete(server: Served, prompt: Sequence[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    text: str = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]
    return text


def _wait_for_stores(llm: LLM) -> None:
    """Ask until the number of stored blocks stays the same: what is evicted during a store is not stored."""
    before, same = -1, 0
    while same < 20:
        stored = llm.statistics().get("disk_num_stored", 0)
        before, same = stored, same + 1 if stored == before else 0


@pytest.fixture
def start(
    checkpoint_factory: Callable[..., tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LLM]:
    folder, _ = checkpoint_factory("llama")
    costs = OwnCosts(tmp_path / "home", monkeypatch)

    def start(model: Path = folder, **settings: Any) -> LLM:
        given = {"ssd_cache_dir": str(tmp_path / "cache"), "ssd_cache_bytes": 2**24} | settings
        costs.forget()
        llm = LLM(model, **(SETTINGS | given))
        for _ in range(10_000):
            if not given["ssd_cache_bytes"] or llm.statistics()["disk_num_pages"]:
                break
        return llm

    return start


def computed(llm: LLM) -> int:
    """Return the tokens that were in host memory, and were computed on a busy machine: loads seemed slow, or were."""
    counts = llm.statistics()
    return 56 * (counts["load_choices_compute"] + counts["host_num_late"])


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), ("cpu", 2), pytest.param("cuda", 1, marks=pytest.mark.gpu)])
def test_host_memory_outlives_the_worker(start: Callable[..., LLM], device: str, ranks: int) -> None:
    """Without a disk. The pool has room for two of the six prompts."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    sizes = {"cpu_offload_bytes": 2**24, "tensor_parallel_size": ranks, "num_gpu_blocks_override": 20}
    with start(**NO_DISK, **sizes, device=device) as llm:
        first, num_cached = answers(llm, PROMPTS[:6])
        assert num_cached == 0
        again, num_cached = answers(llm, PROMPTS[:6])
        assert num_cached + computed(llm) >= 3 * 56
        for process in engine_processes("quire.worker_proc"):
            process.kill()
        before = computed(llm)
        third, num_cached = answers(llm, PROMPTS[:6])
        assert num_cached + computed(llm) - before >= 2 * 56, "what was only on the device is lost"
        assert first == again == third
        counts = llm.statistics()
        assert counts["host_num_failed"] == 0 < counts["host_num_loaded"]


@pytest.mark.parametrize(("ranks", "host_bytes"), [(1, 2**18), (2, 2**18), (1, 0)])
def test_the_next_engine_finds_prefixes(start: Callable[..., LLM], ranks: int, host_bytes: int) -> None:
    """The pool has room for six of the 14 prompts, and host memory for some blocks."""
    settings = {"tensor_parallel_size": ranks, "cpu_offload_bytes": host_bytes}
    with start(**settings) as llm:
        first, num_cached = answers(llm, PROMPTS)
        assert num_cached == 0
        again, _ = answers(llm, PROMPTS)
        for process in engine_processes("quire.scheduler_proc"):
            process.kill()
        third, _ = answers(llm, PROMPTS)
        assert llm.statistics()["disk_num_failed"] == 0
    with start(**settings) as llm:
        num_found = llm.statistics()["disk_num_cached"]
        fourth, num_cached = answers(llm, PROMPTS)
        assert num_found > 8 and num_cached and llm.statistics()["disk_num_loaded"]
        assert first == again == third == fourth
        assert llm.reset_prefix_cache()
    with start(**settings) as llm:
        assert answers(llm, PROMPTS) == (first, 0), "they were forgotten"


def test_a_killed_server_leaves_what_the_next_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of the server get SIGKILL at once, while it writes."""
    costs = OwnCosts(tmp_path / "home", monkeypatch)
    flags = ["--num-gpu-blocks-override", "200", "--cpu-offload-bytes", "4MiB"]
    flags += ["--ssd-cache-dir", str(tmp_path / "cache"), "--ssd-cache-bytes", "64MiB"]
    prompts = [[RNG.randrange(10, 200) for _ in range(500)] for _ in range(16)]

    killed = Served(*flags)
    first = [complete(killed, prompt) for prompt in prompts]
    processes = processes_of(killed.process.pid, "quire.")
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, 30)
    killed.stop()
    costs.forget()
    following = Served(*flags)
    try:
        assert [complete(following, prompt) for prompt in prompts] == first
        counts = httpx.get(f"{following.url}/metrics").text
        loaded, failed = (
            float(re.findall(rf'tier_num_{name}_blocks_total.*tier="disk".* (\S+)', counts)[0])
            for name in ("loaded", "failed")
        )
        assert loaded > 0 == failed
    finally:
        following.stop()


@pytest.mark.parametrize("host_bytes", [0, 2**18])
def test_changed_weights_of_equal_size_and_time_use_no_earlier_page(
    start: Callable[..., LLM], checkpoint_factory: Callable[..., tuple[Path, Any]], tmp_path: Path, host_bytes: int
) -> None:
    """A tensor is negated in place. Its pages come back with its bytes."""
    model = shutil.copytree(checkpoint_factory("llama")[0], tmp_path / "model")
    weights = model / "model.safetensors"
    with start(model, cpu_offload_bytes=host_bytes) as llm:
        first, _ = answers(llm, PROMPTS)
    before, times = weights.read_bytes(), weights.stat()
    header = int.from_bytes(before[:8], "little")
    at = json.loads(before[8 : 8 + header])["model.layers.0.self_attn.k_proj.weight"]["data_offsets"]
    negated = bytearray(before)
    for byte in range(8 + header + at[0] + 3, 8 + header + at[1], 4):
        negated[byte] ^= 0x80
    weights.write_bytes(negated)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with start(model, cpu_offload_bytes=host_bytes, **NO_DISK) as llm:
        expected, _ = answers(llm, PROMPTS)
    with start(model, cpu_offload_bytes=host_bytes) as llm:
        found, num_cached = answers(llm, PROMPTS)
        assert (found, num_cached, llm.statistics()["disk_num_failed"]) == (expected, 0, 0) and expected != first
    weights.write_bytes(before)
    with start(model, cpu_offload_bytes=host_bytes) as llm:
        assert answers(llm, PROMPTS)[0] == first


def test_damaged_pages_are_computed_and_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = OwnCosts(tmp_path / "home", monkeypatch)
    flags = ["--num-gpu-blocks-override", "60", "--deterministic"]
    flags += ["--ssd-cache-dir", str(tmp_path / "cache"), "--ssd-cache-bytes", "8MiB"]
    prompts = [[RNG.randrange(10, 200) for _ in range(100)] for _ in range(16)]
    before = Served(*flags)
    first = [complete(before, prompt) for prompt in prompts]
    assert before.stop() == 0
    (path,) = (tmp_path / "cache").rglob("*.pages")
    content = bytearray(path.read_bytes())
    size = int(re.findall(rb'"page_bytes":(\d+)', content)[0])
    for page in range(size, len(content), size):
        content[page + size // 2] ^= 1
    path.write_bytes(content)
    costs.forget()
    after = Served(*flags)
    try:
        assert [complete(after, prompt) for prompt in prompts] == first
        assert after.metrics()["quire:tier_num_failed_blocks_total"] > 0
        (line,) = (line for line in after.log if "copies of blocks have failed" in line)
        assert re.search(r"WARNING quire.scheduler: .* blocks=\d+ reason=\"page \d+ for block \d+: ", line)
    finally:
        after.stop()


def test_unusable_sizes_and_folders_end_the_start(start: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"--ssd-cache-bytes must be at least \d+, two pages"):
        start(ssd_cache_bytes=5000)
    with pytest.raises(QuireError, match=r"--cpu-offload-bytes must be at least \d+, a page of all ranks \(got 100\)"):
        start(**NO_DISK, cpu_offload_bytes=100)
    (tmp_path / "file").write_text("")
    with pytest.raises(QuireError, match=r"/file must be a folder, not a link, that belongs to"):
        start(ssd_cache_dir=str(tmp_path / "file"))


HANG = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(int fd) {
    char link[64], path[PATH_MAX] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) < 6 || strcmp(path + strlen(path) - 6, ".pages")) return;
    while (!access(getenv("HANG_FILE"), F_OK)) usleep(10000);
}
#define WRAP(name, memory) \
    ssize_t name(int fd, memory bytes, size_t count, off_t offset) { \
        wait_for(fd); \
        return ((ssize_t (*)(int, memory, size_t, off_t))dlsym(RTLD_NEXT, #name))(fd, bytes, count, offset); \
    }
WRAP(pread, void*) WRAP(pread64, void*) WRAP(pwrite, const void*) WRAP(pwrite64, const void*)
"""
"""A library that lets reads and writes of pages hang while a file exists."""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")
def test_an_engine_serves_on_without_a_disk_that_hangs(
    start: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New schedulers and workers do not wait for it, nor does the end."""
    hang, library = tmp_path / "hang", tmp_path / "hang.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-", "-ldl"]
    subprocess.run(command, input=HANG.encode(), check=True)
    monkeypatch.setenv("HANG_FILE", str(hang))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    began = time.time() - 1  # whose clock is not that of processes
    with start() as llm:
        first, _ = answers(llm, PROMPTS)
        hang.touch()
        assert answers(llm, PROMPTS)[0] == first
        for role in ("scheduler", "worker"):
            for process in engine_processes(f"quire.{role}_proc"):
                process.kill()
            assert answers(llm, PROMPTS)[0] == first
    # A wait for this disk has no end. Older processes are those of engines that other tests have borrowed.
    assert [process for process in engine_processes() if process.create_time() >= began] == []


def test_a_folder_has_one_engine(start: Callable[..., LLM]) -> None:
    with start(), pytest.raises(QuireError, match=r"another engine uses .*: stop it, or choose another folder"):
        start()
