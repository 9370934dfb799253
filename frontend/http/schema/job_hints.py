"""The job of a request, from whichever hint its client sends: fields of the body, or a header."""

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.frontend.engine.job import Job, check_job_id
from quire.frontend.http.schema.bodies import GenerationBody, JobId
from quire.frontend.http.schema.reading import read
from quire.frontend.http.schema.unknown_fields import Ignored
from quire.protocol.errors import InvalidRequest, printable

SESSION_HEADER = "X-Session-ID"


class AgentContext(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamo's ``nvext.agent_context``. A trajectory is one chain of turns; a session may have several."""

    session_id: JobId
    trajectory_id: JobId | None = None
    session_final: bool = False
    # Ignored:
    session_type_id: str = ""
    parent_session_id: str = ""
    parent_trajectory_id: str = ""
    kv_hints: Any = None


class KvHints(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of hints for a KV cache that vLLM and others have agreed on."""

    protocol_version: str
    message_id: str
    actions: list[dict[str, Any]]


class KvHintAction(msgspec.Struct, frozen=True, kw_only=True):
    """No type of action has a meaning here yet: all are ignored."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


def job_of(body: GenerationBody, ignored: Ignored) -> Job:
    """Return the job that a body names.

    Raises:
        InvalidRequest: a hint is malformed.
    """
    _check_kv_hints(body, ignored)
    job = Job(is_last_step=body.is_last_step).or_by("job_id", body.job_id or "")
    if body.prompt_cache_key:
        job = job.or_by("cache_key", check_job_id("prompt_cache_key", body.prompt_cache_key))
    where = "nvext.agent_context"
    given = (body.nvext or {}).get("agent_context")
    if given is None:
        return job
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an object (got {printable(given)})", where)
    context = read(AgentContext, given, where, ignored=ignored)
    is_last = job.is_last_step or context.session_final
    return Job(job.id, is_last, job.hint).or_by("agent_context", context.trajectory_id or context.session_id)


def with_session(job: Job, headers: Iterable[tuple[bytes, bytes]], session: str = "") -> Job:
    """Return the job of a request with these headers. ``session``: id of the open session that it continues, or "".

    Raises:
        InvalidRequest: the header is malformed, or the request is the last step of no job.
    """
    job = job.or_by("session", session)
    name = SESSION_HEADER.lower().encode()
    for given in [value for key, value in headers if key == name]:
        job = job.or_by("session", check_job_id(SESSION_HEADER, given.decode("latin-1")))
    if job.is_last_step and not job.id:
        text = f"is_last_step needs the job whose last step it is: send job_id or the header {SESSION_HEADER}"
        raise InvalidRequest(text, "is_last_step")
    return job


def _check_kv_hints(body: GenerationBody, ignored: Ignored) -> None:
    if body.kv_hints is not None:
        hints = read(KvHints, body.kv_hints, "kv_hints", ignored=ignored)
        for i, action in enumerate(hints.actions):
            read(KvHintAction, action, f"kv_hints.actions[{i}]", ignored=ignored)
