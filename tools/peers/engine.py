"""A peer of ``quire bench engine``: a script that the peer's own interpreter runs.

    python engine.py write CONFIG.json FOLDER SEED      # a random-weights checkpoint, bfloat16, by transformers
    python engine.py serve FOLDER transformers-static|transformers-continuous|vllm DTYPE THREADS

``write`` prints ``{}`` when it is done. ``serve`` prints one JSON line when it is ready, and then answers each input
line ``{"prompts": [[id, ...]], "output_len": n}`` with one line. The script imports nothing of Quire, so the peer's
environment needs only its own packages.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    command, *rest = sys.argv[1:]
    # The library may print to stdout: reserve stdout for answers and redirect the library's prints to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if command == "write":
        write_checkpoint(Path(rest[0]), Path(rest[1]), int(rest[2]))
        print("{}", file=answers, flush=True)
        return
    folder, mode, dtype, threads = rest
    serve(folder, mode, dtype, int(threads), answers)


def write_checkpoint(config_path: Path, folder: Path, seed: int) -> None:
    import torch
    import transformers

    fields = json.loads(config_path.read_text(encoding="utf-8"))
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def serve(folder: str, mode: str, dtype: str, threads: int, answers: Any) -> None:
    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        started = time.perf_counter()
        import torch

        kind, _, mode = mode.partition("-")
        dtype = fastest_dtype(torch, threads) if dtype == "auto" else dtype
        peer = {"transformers": Transformers, "vllm": Vllm}[kind](folder, mode, dtype, threads)
        answer(ready_s=time.perf_counter() - started, dtype=peer.dtype, version=peer.version)
        for line in sys.stdin:
            order = json.loads(line)
            start = time.perf_counter()
            outputs = peer.generate(order["prompts"], order["output_len"])
            seconds = time.perf_counter() - start
            lengths = [len(ids) for ids in outputs]
            if lengths != [order["output_len"]] * len(order["prompts"]):
                expected = f"{len(order['prompts'])} of {order['output_len']} tokens"
                raise RuntimeError(f"outputs have lengths {lengths[:8]}, expected {expected}")
            answer(seconds=seconds, tokens=sum(map(len, outputs)))
    except Exception as error:  # any error of the library is the peer's result
        answer(error=f"{type(error).__name__}: {error}")


def fastest_dtype(torch: Any, threads: int) -> str:
    """Return the dtype that the CPU multiplies faster, bfloat16 or float32."""
    torch.set_num_threads(threads)
    times = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        x, w = torch.randn(32, 1024).to(dtype), torch.randn(2048, 1024).to(dtype)
        torch.nn.functional.linear(x, w)
        start = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(x, w)
        times[name] = time.perf_counter() - start
    return min(times, key=times.__getitem__)


class Transformers:
    """``static``: one padded batch through ``generate``. ``continuous``: ``generate_batch``, its paged scheduler."""

    def __init__(self, folder: str, mode: str, dtype: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch, self._transformers = torch, transformers
        self.version = transformers.__version__
        self._mode = mode
        self.dtype = dtype
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self.dtype)).eval()

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        run = self._static if self._mode == "static" else self._continuous
        with self._torch.no_grad():
            return run(prompts, output_len)

    def _config(self, output_len: int) -> Any:
        return self._transformers.GenerationConfig(
            max_new_tokens=output_len, min_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def _static(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts)
        whole = self._model.generate(
            ids, generation_config=self._config(output_len), attention_mask=self._torch.ones_like(ids)
        )
        generated: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return generated

    def _continuous(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        # An end token is required here, and -1 is never sampled. min_new_tokens would only add a logits processor.
        config = self._transformers.GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = self._model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=self._batching(prompts, output_len)
        )
        failed = [output.error for output in outputs.values() if output.error]
        if failed or len(outputs) != len(prompts):
            raise RuntimeError(failed[0] if failed else f"{len(outputs)} answers to {len(prompts)} prompts")
        return [list(output.generated_tokens) for output in outputs.values()]

    def _batching(self, prompts: list[list[int]], output_len: int) -> Any:
        """Sizes that fit the whole load at once; by default, transformers sizes its cache from GPU memory."""
        page = 32
        per_request = -(-(max(map(len, prompts)) + output_len) // page) + 1
        return self._transformers.ContinuousBatchingConfig(
            page_size=page,
            num_blocks=per_request * len(prompts) + 8,
            max_batch_tokens=max(2048, len(prompts)),
            max_requests_per_batch=len(prompts),
            allow_block_sharing=False,
        )


class Vllm:
    """vLLM on a CPU: offline API, one process, no CUDA graphs; no prefix caching, because each round has new prompts.

    A round may have up to 64 requests of up to 2,048 tokens.
    """

    def __init__(self, folder: str, mode: str, dtype: str, threads: int) -> None:
        del mode
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        for name, value in settings.items():
            os.environ.setdefault(name, value)
        import vllm

        self.version = vllm.__version__
        self.dtype = dtype
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=2048,
            enforce_eager=True,
            max_num_seqs=64,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        sampling = self._sampling(
            max_tokens=output_len, min_tokens=output_len, temperature=0, ignore_eos=True, detokenize=False
        )
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
