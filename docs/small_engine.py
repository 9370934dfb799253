"""A whole engine in one process: the real scheduler, model runner and sampler, with an explicit main loop.

    python -P docs/small_engine.py "Once upon a time" "Count from 1 to 5."

``quire serve`` runs the same parts in several processes. There the scheduler sends each step to its workers over
ZeroMQ, decides the next step while the current one runs, and survives the death of a worker. A step is the same, so
this file is a good place to start reading. Grammars are omitted, because they need token bitmasks during a step.
"""

import sys
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from quire import SamplingParams
from quire.launch.config.engine_config import make_engine_config
from quire.launch.config.model_folder import find_model
from quire.launch.config.options import EngineOptions
from quire.protocol.model.kv_layout import kv_layout
from quire.protocol.request.sampling_params import seed_for_sample
from quire.protocol.wire.front_end_messages import AddRequest, Rejected, StepOutputs
from quire.scheduler_proc.scheduler import Scheduler
from quire.worker_proc.startup.setup import make_runner


class SmallEngine:
    """Owns one scheduler and one model runner, and passes messages between them.

    Args:
        model: Hugging Face folder or id, or None for the built-in demo model.
        settings: the keyword arguments of ``LLM``.
    """

    def __init__(self, model: str | None = None, **settings: object) -> None:
        self.folder = find_model(model)
        # Without asynchronous scheduling one step is in flight at a time.
        options = EngineOptions(**{"async_scheduling": False, **settings})  # type: ignore[arg-type]
        self.config = make_engine_config(options, folder=self.folder)
        layout = kv_layout(self.config.model, self.config.block_size, self.config.kv_cache_dtype)
        # The worker's half: weights, KV tensors and batch rows. It reports how many KV blocks fit into memory.
        self.runner, ready = make_runner(self.config, layout)
        # The scheduler's half: requests and KV block ids. It uses no tensors.
        self.scheduler = Scheduler(self.config, layout, min(ready.num_blocks))

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Return the output token ids of each prompt of token ids.

        Raises:
            ValueError: the scheduler rejected a prompt; the message contains the reason.
        """
        self._answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        self._request_ids: dict[int, str] = {}
        seed = seed_for_sample(params.seed or 0, 0)
        for request_id, prompt in zip(self._answers, prompts, strict=True):
            self.scheduler.consume(AddRequest(request_id, np.array(prompt, np.int32), params, seed))
        while True:
            self._deliver()
            # Decide which requests run, how many tokens of each, and in which KV blocks. The result is a diff against
            # the previous step, or None if no request is left.
            diff = self.scheduler.schedule()
            if diff is None:
                return list(self._answers.values())
            # Execute: update the batch from the diff, compute KV and logits of the tokens, and sample.
            launched = self.runner.launch(diff)
            result = self.runner.finish(launched).result()
            # Apply the result: append the sampled tokens, end complete requests, and free their blocks.
            self.scheduler.consume(result)

    def _deliver(self) -> None:
        """Take the scheduler's messages. After its introduction a request is identified by its handle, an integer."""
        for _, message in self.scheduler.take_messages():
            match message:
                case StepOutputs():
                    for new in message.introduced:
                        self._request_ids[new.handle] = new.request_id
                    if message.handles is None or message.tokens is None:
                        continue
                    # With drafts a request gets several tokens in one step, and ``counts`` has their numbers.
                    counts = message.counts if message.counts is not None else np.ones_like(message.handles)
                    for handle, token in zip(np.repeat(message.handles, counts), message.tokens, strict=True):
                        self._answers[self._request_ids[int(handle)]].append(int(token))
                case Rejected():
                    raise ValueError(f"prompt {message.request_id} was rejected: {message.message}")


def main() -> None:
    engine = SmallEngine()
    tokenizer = Tokenizer.from_file(str(engine.folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in sys.argv[1:] or ["Once upon a time"]]
    for answer in engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60)):
        print(tokenizer.decode(answer), "\n")


if __name__ == "__main__":
    main()
