"""Terms: what a client's request says beside its prompts and parameters, and what is known of its client."""

import time
from dataclasses import dataclass

from quire.frontend.engine.job import NO_JOB, Job
from quire.frontend.text.prompts import Prompt
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.wire.adapter_messages import AdapterRef
from quire.protocol.wire.front_end_messages import AddRequest


@dataclass(frozen=True, slots=True)
class Terms:
    """What is the same for all sequences of a client's request. The parser makes it, and it is passed whole.

    Attributes:
        priority, cache_salt, tenant, adapter: as of AddRequest; the parser knows neither tenant nor adapter.
        job: the job of all of them; if they are its last step, the last one submitted is.
    """

    priority: int = 0
    cache_salt: str = ""
    job: Job = NO_JOB
    tenant: int = 0
    adapter: AdapterRef | None = None

    def request(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, seed: int, *, is_last: bool = True
    ) -> AddRequest:
        """Return the request of one sequence. ``is_last``: no further one of the client's request follows."""
        return AddRequest(
            request_id,
            prompt.token_ids,
            sampling,
            seed,
            priority=self.priority,
            cache_salt=self.cache_salt,
            arrival=time.monotonic(),
            job_id=self.job.id,
            is_last_step=self.job.is_last_step and is_last,
            adapter=self.adapter,
            tenant=self.tenant,
            hint=self.job.hint,
            items=[each.item for each in prompt.items],
        )

    def without_path(self, text: str) -> str:
        """Return the text of an error for the client: of its adapter, it knows the name only."""
        return text if self.adapter is None else text.replace(self.adapter.path, self.adapter.name)


NO_TERMS = Terms()
