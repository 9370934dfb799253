"""A peer of ``quire bench engine``: a script that the peer's own interpreter runs.

    python engine.py serve PATH NAME DTYPE THREADS REQUESTS TOKENS

NAME: transformers-static, transformers-continuous, vllm (PATH: a checkpoint's folder), llamacpp (a GGUF file) or
openvino (a folder that ``checkpoints.py`` has written). REQUESTS and TOKENS are those of the largest round; a request's
tokens are its prompt and its output.

It prints one JSON line when it is ready, and then answers each input line
``{"prompts": [[id, ...]], "output_len": n}`` with one line. The script imports nothing of Quire, so the peer's
environment needs only its own packages.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    _, path, name, dtype, threads, requests, tokens = sys.argv[1:]
    # The library may print to stdout: reserve stdout for answers and redirect the library's prints to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        started = time.perf_counter()
        kind, _, mode = name.partition("-")
        peers = {"transformers": Transformers, "vllm": Vllm, "llamacpp": LlamaCpp, "openvino": OpenVino}
        peer = peers[kind](path, mode, dtype, int(threads), int(requests), int(tokens))
        answer(ready_s=time.perf_counter() - started, **peer.facts)
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


def fastest_dtype(threads: int) -> str:
    """Return the dtype that the CPU multiplies faster, bfloat16 or float32."""
    import torch

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

    def __init__(self, folder: str, mode: str, dtype: str, threads: int, requests: int, tokens: int) -> None:
        del requests, tokens
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch, self._transformers = torch, transformers
        self._mode = mode
        dtype = fastest_dtype(threads) if dtype == "auto" else dtype
        self.facts = {"dtype": dtype, "version": transformers.__version__}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

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
    """vLLM on a CPU: offline API, one process, no CUDA graphs; no prefix caching: each round has new prompts."""

    def __init__(self, folder: str, mode: str, dtype: str, threads: int, requests: int, tokens: int) -> None:
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

        dtype = fastest_dtype(threads) if dtype == "auto" else dtype
        self.facts = {"dtype": dtype, "version": vllm.__version__}
        self._sampling = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max(2048, tokens),
            enforce_eager=True,
            max_num_seqs=max(64, requests),
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        sampling = self._sampling(
            max_tokens=output_len, min_tokens=output_len, temperature=0, ignore_eos=True, detokenize=False
        )
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class LlamaCpp:
    """llama.cpp by its C functions: each request is a sequence of one batch and has a KV cache of its own.

    Matrices have the dtype of the file, keys and values float16 (llama.cpp's default). Tokens are chosen by numpy.
    """

    BATCH = 4096
    ERROR = 4
    """``GGML_LOG_LEVEL_ERROR``, which the package does not name."""

    def __init__(self, path: str, mode: str, dtype: str, threads: int, requests: int, tokens: int) -> None:
        del mode, dtype
        import ctypes
        from importlib.metadata import version

        import llama_cpp

        self._library = llama_cpp
        self._errors: list[str] = []
        self._log = llama_cpp.llama_log_callback(self._keep_errors)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        model_settings = llama_cpp.llama_model_default_params()
        model_settings.n_gpu_layers = 0
        model = self._checked(llama_cpp.llama_model_load_from_file(path.encode(), model_settings))
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = requests * -(-tokens // 256) * 256
        settings.n_batch = settings.n_ubatch = self.BATCH
        settings.n_seq_max = requests
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = False
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = self._checked(llama_cpp.llama_init_from_model(model, settings))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        description = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(model, description, len(description))
        self.facts = {
            "dtype": description.value.decode().split()[-1].lower(),
            "version": f"llama-cpp-python {version('llama_cpp_python')}",
            "instructions": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def _keep_errors(self, level: int, text: bytes, _: Any) -> None:
        if level == self.ERROR:
            self._errors.append(text.decode(errors="replace"))

    def _checked(self, made: Any) -> Any:
        if not made:
            raise RuntimeError(" ".join(self._errors) or "llama.cpp gave no reason")
        return made

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        self._library.llama_memory_clear(self._memory, True)
        outputs: list[list[int]] = [[] for _ in prompts]
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(output_len):
            for start in range(0, len(rows), self.BATCH):
                self._decode(rows[start : start + self.BATCH], outputs)
            rows = [(out[-1], len(prompts[s]) + step, s, True) for s, out in enumerate(outputs)]
        return outputs

    def _decode(self, rows: list[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """Compute (token, position, sequence, is last) rows and append the best next token of each last one."""
        import numpy as np

        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_last) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, is_last
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}: {' '.join(self._errors)}")
        last = [sequence for _, _, sequence, is_last in rows if is_last]
        if last:
            pointer = self._library.llama_get_logits(self._context)
            logits = np.ctypeslib.as_array(pointer, shape=(len(last), self._vocab_size))
            for sequence, token in zip(last, logits.argmax(axis=1).tolist(), strict=True):
                outputs[sequence].append(token)


class OpenVino:
    """OpenVINO GenAI's continuous batching with a paged KV cache in the dtype of the activations."""

    def __init__(self, path: str, mode: str, dtype: str, threads: int, requests: int, tokens: int) -> None:
        del mode
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        if dtype == "auto":
            abilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            dtype = "bfloat16" if "BF16" in abilities else "float32"
        self.facts = {"dtype": dtype, "version": f"openvino-genai {openvino_genai.__version__}"}
        hint = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = 4096
        scheduling.max_num_seqs = max(64, requests)
        scheduling.cache_size = -(-per_token * requests * (tokens + 64) // 2**30)  # GiB
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = False
        settings = {
            "INFERENCE_PRECISION_HINT": hint,
            "KV_CACHE_PRECISION": hint,
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduling, "CPU", settings, {})

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        import numpy as np

        config = self._genai.GenerationConfig(
            max_new_tokens=output_len, min_new_tokens=output_len, do_sample=False, ignore_eos=True, eos_token_id=2
        )
        requests = [
            self._pipeline.add_request(index, self._openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for output, request in zip(outputs, requests, strict=True):
                while request.can_read():
                    for read in request.read().values():
                        output.extend(read.generated_ids)
        return outputs


if __name__ == "__main__":
    main()
