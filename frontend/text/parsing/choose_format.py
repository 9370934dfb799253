"""Chooses the format of a model's answers, from its checkpoint or by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from quire.frontend.text.parsing.formats import CALL_FORMATS, THOUGHT_FORMATS, recognized, template
from quire.frontend.text.parsing.scanner import Scanner
from quire.frontend.text.parsing.templates import THOUGHTS, Format, load_format
from quire.frontend.text.parsing.thoughts import Thoughts
from quire.frontend.text.parsing.writing import AnswerWriter, answer_writer
from quire.protocol.errors import ConfigError

AUTO, NONE, MARKERS = "auto", "none", "markers"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers.

    Attributes:
        whole: for answers that may have calls.
        without_calls: for answers to requests without tools; None if such an answer is one plain text.
        special_ids: special tokens that are delimiters, so that the text for the parser must have them.
        writer: how the model writes calls; None if that is not known.
        name: the format of calls by name, or the field of the checkpoint that describes it.
    """

    whole: Format
    without_calls: Format | None
    special_ids: frozenset[int] = frozenset()
    writer: AnswerWriter | None = None
    name: str = ""

    @property
    def has_thoughts(self) -> bool:
        return any(region.name in THOUGHTS for region in self.whole.regions)

    def for_request(self, *, with_tools: bool) -> Format | None:
        return self.whole if with_tools else self.without_calls

    def thoughts(self, rendered: str, *, with_tools: bool) -> Callable[[], Thoughts] | None:
        """Return what finds the thoughts of an answer to a conversation with this end; None if it has none."""
        form = self.for_request(with_tools=with_tools)
        if form is None or THOUGHTS.isdisjoint(region.name for region in form.regions):
            return None
        return partial(Thoughts, form, self.prefix(rendered))

    def prefix(self, rendered: str) -> str:
        """Return what the chat template wrote of the answer's thoughts, given the end of the rendered conversation.

        Only an opening at the very end counts: a template may also write one in an earlier place.
        """
        opens = [region.opens for region in self.whole.regions if region.name in THOUGHTS and region.opens is not None]
        scanner = Scanner(opens)
        scanner.push(rendered)
        last = ""
        while True:
            before, found = scanner.next(last=True)
            if last and before.strip():
                last = ""
            if found is None:
                return last + before if last else ""
            last = found.text
            scanner.watch(opens)


def choose_format(
    special_tokens: Mapping[int, str],
    chat_template: str,
    response_template: Any,
    *,
    calls: str = AUTO,
    thoughts: str = AUTO,
    markers: tuple[str, str] | None = None,
) -> AnswerFormat | None:
    """Return the format, or None if answers are plain text.

    Args:
        special_tokens: the tokenizer's, by id.
        response_template: the checkpoint's own template, or None.
        calls, thoughts: names of formats; ``auto``: the checkpoint's or the recognized one; ``none``.
        markers: texts of the thinking markers, or None.

    Raises:
        ConfigError: the checkpoint's template cannot be used.
    """
    name = recognized(chat_template)
    if response_template is not None and calls == thoughts == AUTO:
        data, where = response_template, "response_template in tokenizer_config.json"
    else:
        calls = name if calls == AUTO else "" if calls == NONE else calls
        if thoughts == AUTO:
            thoughts = name if name in THOUGHT_FORMATS else MARKERS
        if calls not in CALL_FORMATS and (thoughts == NONE or (thoughts == MARKERS and markers is None)):
            return None
        data, where = template(calls, thoughts, markers), f"format {calls or thoughts}"
    try:
        whole = load_format(data, where)
    except ConfigError as error:
        raise ConfigError(f"{error}: select a format with --tool-call-parser and --reasoning-parser") from None
    plain = whole.without_calls()
    is_text = not plain.regions and plain.rest.closes is None and not plain.rest.strips
    # Patterns have backslashes before most signs.
    texts = "\n".join(_strings(data)).replace("\\", "")
    needed = frozenset(token_id for token_id, text in special_tokens.items() if text and text in texts)
    writer = answer_writer(
        name if calls == AUTO else calls, whole, None if thoughts == NONE else markers, special_tokens
    )
    return AnswerFormat(whole, None if is_text else plain, needed, writer, where)


@lru_cache(maxsize=8)
def marker_format(start: str, end: str) -> Format:
    """Return the format of an answer that has thoughts between two markers, and no calls."""
    return load_format(template("", MARKERS, (start, end)), "format markers")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
