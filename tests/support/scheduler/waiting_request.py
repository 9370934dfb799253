"""A request as the waiting queue sees it."""

import numpy as np

from quire.protocol.request.sampling_params import SamplingParams
from quire.scheduler_proc.requests.request import Request
from quire.scheduler_proc.requests.tokens import Tokens


def waiting_request(number: int, tenant: int, priority: int = 0, arrival: float = 0.0) -> Request:
    request = Request(
        client=0,
        request_id=f"r{number}",
        tokens=Tokens(np.zeros(1, np.int32), None),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        seed=0,
        stop_tokens=frozenset(),
        max_total_tokens=9,
        priority=priority,
        arrival=arrival,
        account=tenant,
        handle=number,
    )
    request.number = number
    return request
