"""The fields of sampling whose JSON is not what SamplingParams takes: objects, maps by token id, other names."""

import re
from collections.abc import Mapping
from typing import Any

from quire.launch.http.schema.errors import shorten
from quire.launch.http.schema.fields import Fields, any_object, boolean, string
from quire.protocol.errors import InvalidRequest
from quire.protocol.request.sampling_params import MAX_LOGIT_BIAS, check_float
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs

CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")
REPETITION_FIELDS = ("max_pattern_size", "min_pattern_size", "min_count")
FORMATS = ("text", "json_object", "json_schema")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What OpenAI allows as the name of a function or of a schema."""


def sampling_objects(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """Keywords for SamplingParams of those of these fields that are there; the constraint is not among them.

    Raises:
        InvalidRequest: one is of the wrong form; names the field.
    """
    found: dict[str, Any] = {}
    if fields.has("logit_bias"):
        found["logit_bias"] = logit_bias(fields.get("logit_bias"), vocab_size)
    if fields.has("repetition_detection"):
        given = members("repetition_detection", fields.get("repetition_detection"), REPETITION_FIELDS)
        if "max_pattern_size" not in given:
            raise InvalidRequest("repetition_detection must have max_pattern_size", "repetition_detection")
        found["repetition_detection"] = RepetitionDetection(**given)
    if fields.has("extra_args") and fields.has("vllm_xargs"):
        raise InvalidRequest("vllm_xargs is another name of extra_args: give one of them", "vllm_xargs")
    for name in ("extra_args", "vllm_xargs"):
        if fields.has(name):
            any_object(name, fields.get(name))
            found["extra_args"] = fields.get(name)
    return found


def logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    """OpenAI's map from token id, as a string, to a number from -100 to 100."""
    name = "logit_bias"
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"{name} must be an object of at most {MAX_LOGIT_BIAS} token ids", name)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # Only the plain spelling of a number, so that no token is there twice.
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key) or int(key) >= vocab_size:
            raise InvalidRequest(
                f"{name} must have token ids from 0 to {vocab_size - 1} as keys, not {shorten(key)}", name
            )
        biases[int(key)] = check_float(f"{name} of token {key}", bias, -100.0, 100.0, param=name)
    return biases


def constraint(fields: Fields) -> tuple[str, StructuredOutputs] | None:
    """What the answer must look like, and the field that says so: at most one of two may."""
    found: list[tuple[str, StructuredOutputs]] = []
    if fields.has("structured_outputs"):
        given = members("structured_outputs", fields.get("structured_outputs"), CONSTRAINTS)
        found.append(("structured_outputs", StructuredOutputs(**given)))
    if fields.has("response_format"):
        wanted = response_format(fields.get("response_format"))
        found += [] if wanted is None else [("response_format", wanted)]
    if len(found) > 1:
        raise InvalidRequest("response_format and structured_outputs cannot be combined", "response_format")
    return found[0] if found else None


def response_format(value: Any) -> StructuredOutputs | None:
    """OpenAI's field; None for plain text."""
    name = "response_format"
    any_object(name, value)
    kind = value.get("type")
    if kind not in FORMATS:
        raise InvalidRequest(f"{name}.type must be one of {', '.join(FORMATS)}", f"{name}.type")
    members(name, value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind != "json_schema":
        return StructuredOutputs(json_object=True) if kind == "json_object" else None
    where = f"{name}.json_schema"
    described = members(where, value.get("json_schema"), ("name", "description", "schema", "strict"))
    function_name(f"{where}.name", described.get("name"))
    string(f"{where}.description", described.get("description", ""))
    boolean(f"{where}.strict", described.get("strict", False))
    return schema_constraint(described.get("schema"), f"{where}.schema")


def schema_constraint(schema: Any, where: str) -> StructuredOutputs:
    """The constraint to a JSON schema; its refusal names the field ``where`` that the schema came in."""
    any_object(where, schema)
    try:
        return StructuredOutputs(json=schema)
    except InvalidRequest as refusal:
        message = refusal.message.replace("structured_outputs.json", where)
        raise InvalidRequest(message, where, refusal.code) from None


def function_name(where: str, value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise InvalidRequest(f"{where} must be 1 to 64 letters, digits, underscores or dashes", where)
    return value


def members(name: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
    """The members of an object that are not null; any that is not known is refused with the nearest that is."""
    any_object(name, value)
    given: Mapping[str, Any] = value
    Fields({f"{name}.{key}": None for key in given}).refuse_unknown(f"{name}.{key}" for key in known)
    return {key: member for key, member in given.items() if member is not None}
