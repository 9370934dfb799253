"""A whole engine in one process: the real scheduler, model runner and sampler, with the loop in plain sight.

    python -P docs/small_engine.py "Once upon a time" "Count from 1 to 5."

``quire serve`` runs the same parts in several processes: the scheduler sends each step to its workers over ZeroMQ, has
the next step ready while the present one runs, and lives on when a worker dies. None of that changes what a step is,
so this file is the place to begin reading. It leaves out grammars, which need masks from the scheduler in mid-step.
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
from quire.scheduler_proc.core.scheduler import Scheduler
from quire.worker_proc.startup.setup import make_runner


class SmallEngine:
    """Owns one scheduler and one model runner, and moves messages between them.

    ``model`` is a Hugging Face folder or id, or None for the built-in demo model; ``settings`` are those of ``LLM``.
    """

    def __init__(self, model: str | None = None, **settings: object) -> None:
        self.folder = find_model(model)
        # Without asynchronous scheduling one step is in flight at a time.
        options = EngineOptions(**{"async_scheduling": False, **settings})  # type: ignore[arg-type]
        self.config = make_engine_config(options, folder=self.folder)
        layout = kv_layout(self.config.model, self.config.block_size, self.config.kv_cache_dtype)
        # The worker's half: weights, KV tensors, the rows of the batch. It says how many KV blocks fit into memory.
        self.runner, ready = make_runner(self.config, layout)
        # The scheduler's half: requests and KV blocks. It never sees a tensor.
        self.scheduler = Scheduler(self.config, layout, min(ready.num_blocks))

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Return the token ids that continue each prompt of token ids.

        Raises:
            ValueError: the scheduler refuses a prompt; the message says why.
        """
        self._answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        self._request_ids: dict[int, str] = {}
        seed = seed_for_sample(params.seed or 0, 0)
        for request_id, prompt in zip(self._answers, prompts, strict=True):
            self.scheduler.consume(AddRequest(request_id, np.array(prompt, np.int32), params, seed))
        while True:
            self._deliver()
            # Decide: which requests run, how many tokens of each, and in which KV blocks. The answer is a diff against
            # the step before; None means that nothing is left to run.
            diff = self.scheduler.schedule()
            if diff is None:
                return list(self._answers.values())
            # Run: update the batch by the diff, compute the tokens' KV and logits, and sample.
            launched = self.runner.launch(diff)
            result = self.runner.finish(launched).result()
            # Apply: append the sampled tokens, end the requests that are complete, free their blocks.
            self.scheduler.consume(result)

    def _deliver(self) -> None:
        """Take what the scheduler has for its clients. Requests go by small integers, handles, once introduced."""
        for _, message in self.scheduler.take_messages():
            match message:
                case StepOutputs():
                    for new in message.introduced:
                        self._request_ids[new.handle] = new.request_id
                    if message.handles is None or message.tokens is None:
                        continue
                    # With drafts a request gets several tokens in one step; ``counts`` says how many.
                    counts = message.counts if message.counts is not None else np.ones_like(message.handles)
                    for handle, token in zip(np.repeat(message.handles, counts), message.tokens, strict=True):
                        self._answers[self._request_ids[int(handle)]].append(int(token))
                case Rejected():
                    raise ValueError(f"prompt {message.request_id} is refused: {message.message}")


def main() -> None:
    engine = SmallEngine()
    tokenizer = Tokenizer.from_file(str(engine.folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in sys.argv[1:] or ["Once upon a time"]]
    for answer in engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60)):
        print(tokenizer.decode(answer), "\n")


if __name__ == "__main__":
    main()
