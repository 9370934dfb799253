"""Constraint on the output of a request, and the condition that ends a request with repetitive output.

Validated when built, and therefore also when decoded. Only the scheduler process can check whether a grammar compiles,
because it has the compiler (``scheduler_proc/structured``).
"""

from typing import Any

import msgspec

from quire.protocol.errors import InvalidRequest, printable
from quire.protocol.request.output_form import Form

MAX_GRAMMAR_BYTES = 512 * 1024
"""Size limit of a schema, a regular expression, a grammar, or all choices together."""
MAX_CHOICES = 10_000
KINDS = ("json", "regex", "choice", "grammar", "form")
"""The fields of ``StructuredOutputs`` that are not flags. Clients have all but the last."""
MAX_PATTERN_SIZE = 256
MAX_REPETITIONS = 4096


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One constraint, with vLLM's names; exactly one field is set.

    Attributes:
        json: a JSON schema, as text or as an object (stored as text).
        json_object: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar in Lark syntax, or in GBNF (``root ::= ...``).
        form: the form of the output, which front ends set: an object by a schema or calls of tools, say.

    Raises:
        InvalidRequest: no field or several are set, or one has a wrong type, is empty or too long.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    form: Form | None = None

    def __post_init__(self) -> None:
        given = [k for k in KINDS if getattr(self, k) is not None] + ["json_object"] * bool(self.json_object)
        if len(given) != 1:
            kinds = ", ".join(KINDS[:-1])
            text = f"structured_outputs must have exactly one of {kinds}, json_object; it has {len(given)}"
            raise InvalidRequest(text, "structured_outputs")
        if not isinstance(self.json_object, bool):
            given_text = printable(self.json_object)
            raise InvalidRequest(
                f"structured_outputs.json_object must be true or false (got {given_text})", "structured_outputs"
            )
        if isinstance(self.json, dict | bool):
            msgspec.structs.force_setattr(self, "json", encode_schema(self.json))
        if self.choice is not None:
            self._check_choice(self.choice)
        for name in ("json", "regex", "grammar"):
            check_grammar_text(f"structured_outputs.{name}", getattr(self, name))

    @staticmethod
    def _check_choice(choice: Any) -> None:
        good = isinstance(choice, list) and all(isinstance(text, str) and text for text in choice)
        if not good or not 1 <= len(choice) <= MAX_CHOICES:
            given = printable(choice) if not good else f"{len(choice)} entries"
            raise InvalidRequest(
                f"structured_outputs.choice must be a list of 1 to {MAX_CHOICES} non-empty strings (got {given})",
                "structured_outputs",
            )
        check_grammar_text("structured_outputs.choice", "".join(choice))

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        if self.json_object:
            return "json_object"
        return next(k for k in KINDS if getattr(self, k) is not None)


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ends a request if its last output tokens repeat one pattern, with vLLM's names.

    Attributes:
        max_pattern_size: longest pattern, in tokens.
        min_pattern_size: shortest pattern, in tokens.
        min_count: number of consecutive occurrences that ends the request.

    Raises:
        InvalidRequest: a value is out of range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3

    def __post_init__(self) -> None:
        ranges = (
            ("max_pattern_size", 1, MAX_PATTERN_SIZE),
            ("min_pattern_size", 1, self.max_pattern_size),
            ("min_count", 2, MAX_REPETITIONS),
        )
        for name, low, high in ranges:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidRequest(
                    f"repetition_detection.{name} must be an integer from {low} to {high} (got {printable(value)})",
                    "repetition_detection",
                )


def encode_schema(schema: Any) -> str:
    """Encode a schema as JSON text; key order is kept because it determines the order in the output."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", "structured_outputs") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {printable(str(error))}", "structured_outputs") from None


def check_grammar_text(name: str, text: Any) -> None:
    """Raise InvalidRequest unless ``text`` is None, or a non-empty string of valid Unicode within the size limit."""
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{name} must be a non-empty string (got {printable(text)})", "structured_outputs")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        where = f"a lone surrogate at character {error.start}"
        raise InvalidRequest(f"{name} is not valid Unicode text: {where}", "structured_outputs") from None
    if size > MAX_GRAMMAR_BYTES:
        text = f"{name} must have at most {MAX_GRAMMAR_BYTES} bytes (got {size})"
        raise InvalidRequest(text, "structured_outputs")
