"""Sampling fields whose JSON must be converted for SamplingParams: objects, maps by token id, aliases."""

import re
from collections.abc import Mapping
from typing import Any

from quire.frontend.http.schema.bodies import (
    BareSchemaFormat,
    GenerationBody,
    JsonSchema,
    JsonSchemaFormat,
    PlainFormat,
)
from quire.frontend.http.schema.reading import members, read
from quire.frontend.http.schema.unknown_fields import Ignored, unknown_field
from quire.protocol.errors import InvalidRequest, printable, wrong_value
from quire.protocol.request.sampling_params import MAX_LOGIT_BIAS, check_float
from quire.protocol.request.structured_outputs import KINDS, RepetitionDetection, StructuredOutputs

FORMATS = ("text", "json_object", "json_schema")
ALIASES = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields of older vLLM, SGLang and llama.cpp, each a kind of constraint of StructuredOutputs."""


def sampling_objects(body: GenerationBody, vocab_size: int, ignored: Ignored | None = None) -> dict[str, Any]:
    """Return keyword arguments for SamplingParams, without ``structured_outputs``. ``ignored``: as in ``read``.

    Raises:
        InvalidRequest: a field is malformed; names the field.
    """
    found: dict[str, Any] = {}
    if body.logit_bias is not None:
        found["logit_bias"] = logit_bias(body.logit_bias, vocab_size)
    if body.repetition_detection is not None:
        given = members(RepetitionDetection, body.repetition_detection, "repetition_detection", ignored=ignored)
        if "max_pattern_size" not in given:
            raise InvalidRequest("repetition_detection must have max_pattern_size", "repetition_detection")
        found["repetition_detection"] = RepetitionDetection(**given)
    if body.extra_args is not None and body.vllm_xargs is not None:
        raise InvalidRequest("vllm_xargs is another name of extra_args: use one of them", "vllm_xargs")
    extra_args = body.vllm_xargs if body.extra_args is None else body.extra_args
    return found if extra_args is None else found | {"extra_args": extra_args}


def logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    """Parse OpenAI's map from token ids, as strings, to numbers from -100 to 100."""
    name = "logit_bias"
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        given = f"{len(value)} entries" if isinstance(value, dict) else printable(value)
        raise InvalidRequest(f"{name} must be an object of at most {MAX_LOGIT_BIAS} token ids (got {given})", name)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # Only the canonical form of a number, so that no token is there twice.
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key) or int(key) >= vocab_size:
            text = f"{name} keys must be token ids from 0 to {vocab_size - 1} (got {printable(key)})"
            raise InvalidRequest(text, name)
        biases[int(key)] = check_float(f"{name} of token {key}", bias, -100.0, 100.0, param=name)
    return biases


def constraint(
    body: GenerationBody, raw: Mapping[str, Any], ignored: Ignored | None = None
) -> tuple[str, StructuredOutputs] | None:
    """Return the name of the field that constrains the output, and the constraint; or None.

    ``raw``: the body, which may have ALIASES. ``ignored``: as in ``read``.
    """
    found = [(name, _constraint(kind, raw[name], name)) for name, kind in ALIASES.items() if has_alias(raw, name)]
    if body.structured_outputs is not None:
        if body.structured_outputs.get("form") is not None:
            raise unknown_field("structured_outputs.form", [f"structured_outputs.{kind}" for kind in KINDS[:-1]])
        given = members(StructuredOutputs, body.structured_outputs, "structured_outputs", ignored=ignored)
        found.append(("structured_outputs", StructuredOutputs(**given)))
    if body.response_format is not None:
        wanted = response_format(body.response_format, ignored)
        found += [] if wanted is None else [("response_format", wanted)]
    if len(found) > 1:
        last, first = found[-1][0], found[-2][0]
        raise InvalidRequest(f"{last} and {first} cannot be combined", last)
    return found[0] if found else None


def has_alias(raw: Mapping[str, Any], name: str) -> bool:
    """Whether a body has a constraint in this field. Empty and false values are none; ``{}`` is a schema."""
    return name in raw and (bool(raw[name]) or raw[name] == {})


def response_format(value: dict[str, Any], ignored: Ignored | None = None) -> StructuredOutputs | None:
    """Parse OpenAI's ``response_format``; None for plain text. ``ignored``: as in ``read``."""
    name, kind = "response_format", value.get("type")
    if kind not in FORMATS:
        raise wrong_value(f"{name}.type", f"one of {', '.join(FORMATS)}", kind)
    if kind != "text" and value.get("json_schema") is None and any(value.get(key) for key in ("schema", "value")):
        bare = read(BareSchemaFormat, value, name, ignored=ignored)
        return schema_constraint(bare.schema or bare.value or {}, f"{name}.{'schema' if bare.schema else 'value'}")
    if kind != "json_schema":
        if value.get("json_schema") is not None:
            raise InvalidRequest(f"{name}.json_schema needs {name}.type json_schema", f"{name}.json_schema")
        read(PlainFormat, value, name, ignored=ignored)
        return StructuredOutputs(json_object=True) if kind == "json_object" else None
    where = f"{name}.json_schema"
    given = read(JsonSchemaFormat, value, name, ignored=ignored).json_schema
    described = read(JsonSchema, given, where, ignored=ignored)
    return schema_constraint(described.schema, f"{where}.schema")


def schema_constraint(schema: dict[str, Any], where: str) -> StructuredOutputs:
    """Return the constraint that the output matches a JSON schema. Errors name ``where``, the schema's field."""
    return _constraint("json", schema, where)


def _constraint(kind: str, value: Any, where: str) -> StructuredOutputs:
    try:
        return StructuredOutputs(**{kind: value})
    except InvalidRequest as error:
        message = error.message.replace(f"structured_outputs.{kind}", where)
        raise InvalidRequest(message, where, error.code) from None
