"""vLLM on a CPU as a peer: its offline API, one process, no graphs, no prefix caching (each round has new prompts)."""

import os
from typing import Any


class Peer:
    """Up to 64 requests of up to 2,048 tokens, which is what a round may hold."""

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
