"""Prompts of questions about one conversation, and the tokens of their answers."""

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.decisions.asking import Asker
from quire.frontend.text.decisions.questions import Choice, ChoiceQuestion, Question, question_text
from quire.frontend.text.decisions.reads import Asked, Decisions
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLANK = (  # as Llama 2's
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} "
    "{% endif %}{% endfor %}"
)
LEAD = "\n\nRead the question below about the input above. Write one of its allowed answers as listed, and no more.\n\n"


def question(text: str, *answers: str) -> Question:
    return ChoiceQuestion(instructions=text, choices=[Choice(value=answer) for answer in answers])


def asked(
    tokenizer: Tokenizer,
    template: str,
    *questions: Question,
    markers: Any = ((), ()),
    given: str = "hello",
    most: int = 256,
) -> tuple[TextIn, list[Asked]]:
    text_in = TextIn(Tokenizer.from_str(tokenizer.to_str()), ChatTemplate(template, {}, "test"))
    if markers[0]:
        text_in.protect(("<t>", "</t>"))
    limits: Any = SimpleNamespace(max_model_len=most, vocab_size=420)
    asker = Asker([{"role": "user", "content": given}], ChatOptions(), text_in, limits, markers)
    return text_in, [*asker.ask(questions).asked] if questions else []


def joining(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that writes a text otherwise at its beginning, so that prompts cannot be cut."""
    made = Tokenizer.from_str(tokenizer.to_str())
    made.normalizer = normalizers.Prepend("X")
    return made


@pytest.mark.parametrize("is_joining", [False, True])
@pytest.mark.parametrize(
    ("template", "end", "blank"), [(CHATML, "<|im_end|>\n<|im_start|>assistant\n", ""), (BLANK, " [/INST]", " ")]
)
def test_prompts_and_answers_are_tokenized_as_a_whole(
    tokenizer: Tokenizer, template: str, end: str, blank: str, is_joining: bool
) -> None:
    """Also text that looks like a special token stays text, in the question and in an answer."""
    questions = [question(text, "one two", "three") for text in ("Is it one?", "Which of 3?")]
    used = joining(tokenizer) if is_joining else tokenizer
    text_in, found = asked(used, template, *questions)
    begin = "<|im_start|>user\n" if template is CHATML else "[INST] "
    for each in found:
        whole = text_in.encode(f"{begin}hello{LEAD}{question_text(each.question, '')}{end}", add_special_tokens=False)
        assert each.prompt.token_ids.tolist() == whole
        if not is_joining:
            answers = [text_in.encode(blank + answer, add_special_tokens=False) for answer in ("one two", "three")]
            assert [list(answer) for answer in each.answers] == answers
    _, (special,) = asked(tokenizer, CHATML, question("<|im_end|>?", "<|im_end|>", "no"))
    assert special.prompt.token_ids.tolist().count(2) == 1 and 2 not in special.answers[0]


def test_open_thoughts_are_closed(tokenizer: Tokenizer) -> None:
    text_in, _ = asked(tokenizer, CHATML)
    start, end = (text_in.encode(text, add_special_tokens=False) for text in ("<t>", "</t>"))
    template = CHATML.replace("assistant\n{", "assistant\n<t>{")
    _, (each,) = asked(tokenizer, template, question("?", "yes", "no"), markers=(start, end))
    assert each.prompt.token_ids.tolist()[-len(end) :] == end
    _, (each,) = asked(tokenizer, CHATML, question("?", "yes", "no"), markers=(start, end), given="<t>")
    assert each.prompt.token_ids.tolist()[-len(end) :] != end


@pytest.mark.parametrize(
    ("template", "answers", "says"),
    [
        ("{{ messages[0].content | upper }}", ("a", "b"), "does not write the text of messages as it is"),
        (CHATML, ("a", "one " * 300), "maximum context length is 256 tokens"),
        (CHATML, ("a", "one " * 200), "maximum context length is 256 tokens"),
    ],
)
def test_refusals(tokenizer: Tokenizer, template: str, answers: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        asked(tokenizer, template, question("?", *answers))


def test_too_many_reads_are_refused(tokenizer: Tokenizer) -> None:
    choices = (f"{i} one two three four five six" for i in range(255))
    _, (each,) = asked(tokenizer, CHATML, question("?", *choices), most=20_000)
    with pytest.raises(InvalidRequest, match=r"at most 16384 beginnings \(got \d+ in tokens\): ask fewer"):
        Decisions([each] * 20)
    assert max(len(read.token_ids) for read in Decisions([each]).reads) <= 128
