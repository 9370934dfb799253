"""Tokenizer and chat template of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from quire.frontend.text.chat_template import ChatTemplate, Conversation
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import ConfigError, InvalidRequest

USER = {"role": "user", "content": "hello"}


def render(source: str, messages: list[Any] | None = None, **kwargs: Any) -> str:
    kwargs.setdefault("max_chars", 10_000)
    return ChatTemplate(source, {"bos_token": "<s>"}, "test").render(
        Conversation(messages=messages or [USER], **kwargs)
    )


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class TestLoad:
    def test_without_a_tokenizer_only_ids_are_accepted(self, tmp_path: Path) -> None:
        text_in = TextIn.load(tmp_path)
        assert text_in.tokenizer is None
        assert text_in.decode([1, 2]) == ""
        with pytest.raises(InvalidRequest, match=r"no tokenizer.*token ids"):
            text_in.encode("hello")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            text_in.encode_chat([USER], ChatOptions(), 100)

    def test_without_a_template_chat_is_refused(self, folder: Path) -> None:
        with pytest.raises(InvalidRequest, match="no chat template") as caught:
            TextIn.load(folder).encode_chat([USER], ChatOptions(), 100)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        "template",
        [
            "{{ bos_token }}{{ messages[0].content }}",
            [
                {"name": "tool_use", "template": "wrong"},
                {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
            ],
        ],
    )
    def test_template_in_the_tokenizer_config(self, folder: Path, template: Any) -> None:
        config = {"chat_template": template, "bos_token": {"content": "<|endoftext|>", "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        text_in = TextIn.load(folder)
        ids = text_in.encode_chat([USER], ChatOptions(), 100)
        assert text_in.decode(ids, skip_special_tokens=False) == "<|endoftext|>hello"

    def test_a_template_file_takes_precedence(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text('{"chat_template": "no"}')
        (folder / "chat_template.jinja").write_text("yes")
        text_in = TextIn.load(folder)
        assert text_in.decode(text_in.encode_chat([USER], ChatOptions(), 100)) == "yes"

    @pytest.mark.parametrize("in_files", [False, True])
    def test_named_templates_are_chosen_as_in_transformers(self, folder: Path, in_files: bool) -> None:
        named = {
            "default": "\n a {{ messages[0].content }} \n\n",
            "tool_use": "\n b{%- if 1 %}\n {% endif %}",
            "rag": "c",
        }
        (folder / "tokenizer_config.json").write_text('{"chat_template": "d"}')
        if in_files:
            (folder / "additional_chat_templates").mkdir()
            (folder / "chat_template.jinja").write_text(named.pop("default"))
            for name, source in named.items():
                (folder / f"additional_chat_templates/{name}.jinja").write_text(source)
        else:
            config = [{"name": name, "template": source} for name, source in named.items()]
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
        reference, text_in = PreTrainedTokenizerFast.from_pretrained(folder), TextIn.load(folder)
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            expected = reference.apply_chat_template([USER], tools=tools, tokenize=False)
            assert text_in.template is not None
            assert render(text_in.template.source, tools=tools) == expected

    def test_named_templates_without_a_default(self, folder: Path) -> None:
        config = [{"name": "tool_use", "template": "yes"}, {"name": "rag", "template": "no"}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
        text_in = TextIn.load(folder)
        assert text_in.template is not None
        assert render(text_in.template.source, tools=[{}]) == "yes"
        with pytest.raises(InvalidRequest, match="no default template, only rag, tool_use: use --chat-template"):
            render(text_in.template.source)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("tokenizer.json", "{}"),
            ("tokenizer.json", "not json"),
            ("tokenizer_config.json", "[1"),
            ("tokenizer_config.json", "[]"),
            ("tokenizer_config.json", '{"chat_template": 7}'),
            ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
            ("chat_template.jinja", "{{ unclosed"),
        ],
    )
    def test_an_unusable_file_is_reported_in_one_line(self, folder: Path, name: str, text: str) -> None:
        (folder / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            TextIn.load(folder)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_truncation_and_padding_are_off(self, folder: Path, tokenizer: Tokenizer) -> None:
        changed = Tokenizer.from_str(tokenizer.to_str())
        changed.enable_truncation(4)
        changed.enable_padding(length=64)
        changed.save(str(folder / "tokenizer.json"))
        text = "one two three four five six seven"
        assert TextIn.load(folder).encode(text) == tokenizer.encode(text).ids


class TestEncode:
    def test_raw_prompts_get_the_tokenizers_special_tokens_and_chats_do_not(self, tokenizer: Tokenizer) -> None:
        with_bos = Tokenizer.from_str(tokenizer.to_str())
        with_bos.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        text_in = TextIn(with_bos, ChatTemplate("{{ messages[0].content }}", {}, "test"))
        plain = tokenizer.encode("hello").ids
        assert text_in.encode("hello") == [0, *plain]
        assert text_in.encode("hello", add_special_tokens=False) == plain
        assert text_in.encode_chat([USER], ChatOptions(), 100) == plain

    def test_text_that_cannot_fit_is_not_tokenized(self, text_in: TextIn) -> None:
        with pytest.raises(InvalidRequest, match=r"maximum context length is 16 tokens.*at least") as caught:
            text_in.encode("x" * (16 * text_in.max_token_chars + 1), max_tokens=16)
        assert caught.value.code == "context_length_exceeded"
        assert text_in.encode("x" * 16, max_tokens=16) == text_in.encode("x") * 16

    def test_a_lone_surrogate_is_refused(self, text_in: TextIn) -> None:
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            text_in.encode("a\ud800b")


class TestTemplate:
    def test_template_functions_of_transformers_exist(self) -> None:
        assert render("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "hello"}]'
        assert render("{{ {'a': '<é>'} | tojson(indent=1) }}") == '{\n "a": "<é>"\n}'
        assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
        assert render("{% generation %}x{% endgeneration %}y") == "xy"
        assert len(render("{{ strftime_now('%Y') }}")) == 4
        assert render("{% if true %}\n  x\n  {% endif %}\n") == "  x\n"
        assert render("{{ unknown }}{{ thinking }}", variables={"thinking": 1}) == "1"
        assert render("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}") == "3"

    def test_a_templates_refusal_is_reported_to_the_client(self) -> None:
        with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
            render("{{ raise_exception('roles must\nalternate') }}")

    def test_output_is_capped(self, text_in: TextIn) -> None:
        source = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}"
        greedy = TextIn(text_in.tokenizer, ChatTemplate(source, {}, "test"))
        with pytest.raises(InvalidRequest, match="maximum context length is 64 tokens"):
            greedy.encode_chat([USER], ChatOptions(), 64)

    @pytest.mark.parametrize(("trim", "expected"), [("", "[hello ][so "), ("|trim", "[hello][so")])
    def test_continue_final_message(self, trim: str, expected: str) -> None:
        source = "{% for m in messages %}[{{ m.content" + trim + " }}]{% endfor %}"
        messages = [{"role": "user", "content": "hello "}, {"role": "assistant", "content": "so "}]
        assert render(source, messages, continue_final_message=True) == expected
