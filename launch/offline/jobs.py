"""The jobs of a call of the offline API."""

from collections.abc import Sequence

from quire.frontend.engine.job import NO_JOB, Job, check_job_id
from quire.protocol.errors import InvalidRequest, printable

JobIds = str | Sequence[str | None] | None


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
    ids = [given] * num_prompts if given is None or isinstance(given, str) else list(given)
    if len(ids) != num_prompts:
        raise InvalidRequest(f"{len(ids)} job_ids for {num_prompts} prompts", "job_id")
    if not isinstance(is_last_step, bool):
        raise InvalidRequest(f"is_last_step must be true or false (got {printable(is_last_step)})", "is_last_step")
    if is_last_step and None in ids:
        raise InvalidRequest("is_last_step needs a job_id, whose last step it is", "is_last_step")
    jobs = [NO_JOB if each is None else Job(check_job_id("job_id", each), is_last_step, "job_id") for each in ids]
    newest = {job.id: i for i, job in enumerate(jobs)}
    return [job if newest[job.id] == i else job.continued() for i, job in enumerate(jobs)]
