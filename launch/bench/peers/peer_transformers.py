"""transformers as a peer: ``static`` is one padded batch, ``continuous`` its paged scheduler."""

import importlib
from typing import Any


class Peer:
    """``static``: one padded batch through ``generate``. ``continuous``: ``generate_batch``, its paged scheduler."""

    def __init__(self, folder: str, mode: str, dtype: str, threads: int) -> None:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
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
        # End tokens cannot be left out here: -1 is one that never comes. min_new_tokens would only add a processor.
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
        """Sizes that hold the whole load at once: left alone, it sizes its cache by a GPU's memory."""
        page = 32
        per_request = -(-(max(map(len, prompts)) + output_len) // page) + 1
        return self._transformers.ContinuousBatchingConfig(
            page_size=page,
            num_blocks=per_request * len(prompts) + 8,
            max_batch_tokens=max(2048, len(prompts)),
            max_requests_per_batch=len(prompts),
            allow_block_sharing=False,
        )
