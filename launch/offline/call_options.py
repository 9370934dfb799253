"""The keywords that all calls of the offline API have, and the terms of requests that follow from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from quire.frontend.adapters.reader import AdapterReader
from quire.frontend.engine.job import NO_JOB, Job, check_job_id
from quire.frontend.engine.terms import Terms
from quire.launch.offline.lora_request import LoRARequest, adapters_for
from quire.protocol.config import MAX_PRIORITY, MIN_PRIORITY
from quire.protocol.errors import InvalidRequest, did_you_mean, printable
from quire.protocol.request.sampling_params import check_int

T = TypeVar("T")
JobIds = str | Sequence[str | None] | None


class RequestOptions(TypedDict, total=False):
    """Options of every method.

    Attributes:
        lora_request: the LoRA adapter for all prompts, or one per prompt. It needs ``enable_lora=True``.
        priority: one for all prompts, or one per prompt; lower values are scheduled first. It has no effect unless
            ``scheduling_policy="priority"``.
    """

    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    priority: int | Sequence[int] | None


class CallOptions(RequestOptions, total=False):
    """Options of ``generate``, ``chat`` and ``beam_search``.

    Attributes:
        use_tqdm: show the progress (false).
        on_text: called with (index of the prompt, new text) of each prompt's first answer, as it is generated.
        job_id: the agent or conversation of which all prompts are turns, or one per prompt (docs/agents.md).
        is_last_step: nothing follows these turns (false).
    """

    use_tqdm: bool
    on_text: Callable[[int, str], None] | None
    job_id: JobIds
    is_last_step: bool


def check_known(method: str, options: Mapping[str, Any], kind: type) -> None:
    """Raise TypeError, as Python does, for a keyword that the method does not have. ``kind``: a TypedDict."""
    known = kind.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"{method} got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")


def terms_for(options: Mapping[str, Any], num_prompts: int, reader: AdapterReader | None) -> list[Terms]:
    """Return the terms of each prompt of a call, as its options say.

    Args:
        reader: reads adapters; None if the engine has none.

    Raises:
        InvalidRequest: a value is refused, or there is not one per prompt.
        AdapterError: as ``adapters_for``.
    """
    jobs = jobs_for(options.get("job_id"), num_prompts, is_last_step=options.get("is_last_step", False))
    priority = options.get("priority")
    priorities = one_each("priorities", 0 if priority is None else priority, num_prompts, "priority")
    adapters = adapters_for(options.get("lora_request"), num_prompts, reader)
    return [
        Terms(check_int("priority", priority, MIN_PRIORITY, MAX_PRIORITY), job=job, adapter=adapter)
        for priority, adapter, job in zip(priorities, adapters, jobs, strict=True)
    ]


def one_each(values: str, given: T | Sequence[T], num_prompts: int, field: str) -> list[T]:
    """Return a value per prompt, from one for all or one for each; raise InvalidRequest if the numbers differ."""
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * num_prompts
    if len(each) != num_prompts:
        raise InvalidRequest(f"{len(each)} {values} for {num_prompts} prompts", field)
    return each


def jobs_for(given: JobIds, num_prompts: int, *, is_last_step: bool) -> list[Job]:
    """Return the job of each prompt.

    Args:
        given: id of the job of all prompts, or one per prompt; None: it is found by the prefix.
        is_last_step: nothing follows these prompts in their jobs.

    Raises:
        InvalidRequest: the numbers differ, an id is none, or a last step has no job.
    """
    if given is not None and not isinstance(given, str | list | tuple):
        raise InvalidRequest(f"job_id must be a string, or a list of one per prompt (got {printable(given)})", "job_id")
    ids = one_each("job_ids", given, num_prompts, "job_id")
    if not isinstance(is_last_step, bool):
        raise InvalidRequest(f"is_last_step must be true or false (got {printable(is_last_step)})", "is_last_step")
    if is_last_step and None in ids:
        raise InvalidRequest("is_last_step needs a job_id, whose last step it is", "is_last_step")
    jobs = [NO_JOB if each is None else Job(check_job_id("job_id", each), is_last_step, "job_id") for each in ids]
    newest = {job.id: i for i, job in enumerate(jobs)}
    return [job if newest[job.id] == i else job.continued() for i, job in enumerate(jobs)]
