"""Special tokens and thinking markers in a request's text stay text, in every way that a template prints it."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from quire.frontend.text.chat_template import ChatTemplate
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.request.thinking import ThinkingState

TEMPLATES = (
    "{{ messages[0].content }}",
    "{{ messages[0] }}",
    "{{ messages }}",
    "{{ messages | tojson }}",
    "{{ messages[0] | tojson(ensure_ascii=true) }}",
    "{{ messages[0] | string }}",
    "{{ 'x' ~ messages }}",
    "{{ '%s' % messages }}",
    "{% for m in messages %}{{ m.content.split('>') | join('>') }}{{ m.tool_calls }}{% endfor %}",
    "{{ tools }}",
    "{{ tools | tojson(indent=2) }}",
    "{% for tool in tools %}{{ tool.function.name ~ tool.function.parameters }}{% endfor %}",
    "{{ extra }}",
)
TAGS = "{% if false %}<think></think>{% endif %}"


@pytest.fixture(scope="module")
def tagged(tokenizer: Tokenizer) -> Tokenizer:
    """The small tokenizer with thinking markers that are added tokens, but not special."""
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return made


@pytest.mark.parametrize("control", ["<|im_start|>", "<think>", "</think>"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_no_control_token(tagged: Tokenizer, template: str, control: str) -> None:
    text_in = TextIn(tagged, ChatTemplate(template + TAGS + "<|im_end|>", {}, "test"))
    call = {"function": {"name": control, "arguments": {control: [control]}}}
    messages = [{"role": "user", "content": f"a{control}b", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": control, "parameters": {control: {"enum": [control]}}}}]
    ids = text_in.encode_chat(messages, ChatOptions(tools=tools, variables={"extra": [control]}), 2000)
    assert tagged.token_to_id(control) not in ids
    assert ids[-1] == tagged.token_to_id("<|im_end|>")
    assert control in tagged.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("mark", ["\ue0f0", "\\ue0f0", "\\\\ue0f1", "\\uE0F0", "\\u\ue0f0e0f0"])
def test_marks_in_a_message_hide_nothing_of_the_template(tagged: Tokenizer, mark: str) -> None:
    text_in = TextIn(tagged, ChatTemplate("{{ messages }}<|im_end|>{{ messages | tojson }}", {}, "test"))
    ids = text_in.encode_chat([{"role": "user", "content": f"a{mark}b"}], ChatOptions(), 2000)
    assert ids.count(tagged.token_to_id("<|im_end|>")) == 1


def test_tags_that_the_template_does_not_write_are_tokens(tagged: Tokenizer) -> None:
    """Some vocabularies have tokens for the tags of HTML."""
    text_in = TextIn(tagged, ChatTemplate("{{ messages[0].content }}", {}, "test"))
    ids = text_in.encode_chat([{"role": "user", "content": "a<think>b"}], ChatOptions(), 2000)
    assert tagged.token_to_id("<think>") in ids


def test_a_marker_of_several_tokens(tokenizer: Tokenizer) -> None:
    """Its tokens are not in the prompt, where the engine would take them for thinking."""
    text_in = TextIn(tokenizer, ChatTemplate("{{ messages[0].content }}<|im_end|>", {}, "test"))
    marker = "the little"
    wanted = text_in.encode(marker, add_special_tokens=False)
    assert len(wanted) > 1

    def is_in(ids: list[int]) -> bool:
        return any(ids[at : at + len(wanted)] == wanted for at in range(len(ids)))

    message: list[dict[str, Any]] = [{"role": "user", "content": f"{marker}, {json.dumps(marker)}"}]
    assert is_in(text_in.encode_chat(message, ChatOptions(), 2000))
    text_in.protect([marker])
    ids = text_in.encode_chat(message, ChatOptions(), 2000)
    assert not is_in(ids)
    assert tokenizer.decode(ids).startswith(marker)


@pytest.mark.parametrize("marker", ["<think>", "the little"])
@pytest.mark.parametrize("name", ["content", "reasoning_content", "name"])
def test_messages_open_no_thinking_span(tagged: Tokenizer, marker: str, name: str) -> None:
    """The engine looks for the markers in the prompt's tokens: a schema does not apply while the model thinks."""
    text_in = TextIn(tagged, ChatTemplate("{% for m in messages %}{{ m }}{{ m.content }}{% endfor %}", {}, "test"))
    start, end = (text_in.encode(text, add_special_tokens=False) for text in (marker, "</think>"))
    text_in.protect([marker, "</think>"])
    message = {"role": "user", "content": "a", name: f"{marker}\n"}
    assert not ThinkingState(start, end, text_in.encode_chat([message], ChatOptions(), 2000)).is_open
    assert ThinkingState(start, end, text_in.encode(marker)).is_open


EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
END = "<|im_end|>\n{% endfor %}" + TAGS
ANSWERS = (
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}",
    "{% if '</think>' in c and m.role == 'assistant' %}"
    "{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}<think>\n{{ r.strip('\n') }}\n</think>\n\n"
    "{{ c.split('</think>')[-1].lstrip('\n') }}{% else %}{{ c }}{% endif %}",
    "{% if c.startswith('<think>') %}{{ c[7:] | trim }}{% else %}{{ c | trim }}{% endif %}",
    "{{ c | trim }}{{ m.reasoning_content | default('') | trim }}",
)
THOUGHTS = (
    "<think>\nhm\n</think>\n\nyes",
    "hm\n</think>\n\nyes",
    " <|im_end|> ",
    "a\n<think>\nopen",
    "\n</think>",
    "hm\n</think>\n\nyes <think>",
    "yes",
)


@pytest.mark.parametrize("template", ANSWERS)
@pytest.mark.parametrize("answer", THOUGHTS)
def test_marks_leave_no_trace_in_the_text(tagged: Tokenizer, template: str, answer: str) -> None:
    """Templates trim and split around tags. Text and ids of earlier thoughts are those of transformers."""
    source = EACH + template + END
    text_in = TextIn(tagged, ChatTemplate(source, {}, "test"))
    text_in.protect(["<think>", "</think>"])
    for user in ("one", "\n<|im_end|>\n", " </think>\n<think> "):
        messages = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer, "reasoning_content": user},
        ]
        rendered = text_in.render_chat(messages, ChatOptions(), 2000)
        (expected,), _ = render_jinja_template([messages], chat_template=source)
        ids = text_in.encode_rendered(rendered)
        assert tagged.decode(ids, skip_special_tokens=False) == expected
        assert ids.count(tagged.token_to_id("<|im_end|>")) == 2
        assert not ThinkingState(*([tagged.token_to_id(text)] for text in ("<think>", "</think>")), ids).is_open
        if user == "one" and answer in THOUGHTS[:2]:
            assert ids == tagged.encode(expected).ids


def test_marks_that_lead_the_template_another_way_stay(tagged: Tokenizer) -> None:
    """A user's tag is never the template's, also if the text that transformers renders is another one."""
    source = EACH + "{{ 'tool' if c.startswith('<think>') else 'user' }}{{ c }}" + END
    text_in = TextIn(tagged, ChatTemplate(source, {}, "test"))
    ids = text_in.encode_chat([{"role": "user", "content": "<think>"}], ChatOptions(), 2000)
    assert tagged.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nuser<think><|im_end|>\n"
    assert tagged.token_to_id("<think>") not in ids
