"""Text to token ids: a checkpoint's tokenizer and chat template, and the behaviour without one of them."""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
from tokenizers import Encoding, Tokenizer

from quire.frontend.text.chat_template import Conversation, Message, RenderedTooLong
from quire.frontend.text.control_text import (
    MARK_END,
    MARK_START,
    mark_parts,
    mark_special,
    special_pattern,
    with_marks,
)
from quire.frontend.text.image_parts import MessageImages
from quire.frontend.text.placed_items import expanded
from quire.frontend.text.template_files import load_template, special_variables
from quire.frontend.text.template_helper import TemplateHelper
from quire.frontend.text.tokenizer_checks import check_speed, check_token_ids
from quire.protocol.errors import ConfigError, InvalidRequest
from quire.protocol.model.descriptions import TOKENIZER, TOKENIZER_CONFIG, read_description, why_no_tokenizer
from quire.protocol.model.gguf_file import is_gguf
from quire.protocol.process.log import event_logger

log = event_logger("frontend.text")

NO_TOKENIZER = "this model has no tokenizer: give the prompt as token ids"
NO_TEMPLATE = "this model has no chat template: use completions"
# Of longer texts, first a prefix of this many characters per token of context is tokenized, then one 4 times as long.
PROBED_CHARS_PER_TOKEN = 16
# Tokenizing more takes over 4 ms, too long to hold the interpreter lock; shorter texts are not worth another thread.
LONG_TEXT_CHARS = 8192
LONG_IDS = 8192
SLOW_SECONDS = 0.25
"""CPU time for a short text, 50 times the usual one, after which a tokenizer never runs in the event loop."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of rendering a conversation; by default the text ends where the assistant's answer starts.

    ``images``: those of its messages, which must be read.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    images: MessageImages = field(default_factory=MessageImages)


class TextIn:
    """The tokenizer and the chat template of one checkpoint, either of which may be missing.

    Raw prompts get the special tokens that the tokenizer adds itself (such as a beginning-of-text token), and may
    contain special tokens as text, as with transformers. Conversations get only the special tokens that the template
    writes, and text of a message that looks like a special token stays plain text.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, template: TemplateHelper | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.response_template: Any = None
        """The checkpoint's description of its answers; see ``parsing/``."""
        self.tokenizer_info: Mapping[str, str] = {}
        """The tokenizer's class, and special tokens such as ``eos_token``, of the checkpoint's configuration."""
        self.truncation_side: Literal["left", "right"] = "right"
        """The end of a text that is cut off, if the text may be truncated and the request does not say which."""
        self.input_names: Any = None
        """``model_input_names`` of the checkpoint's configuration: what its tokenizer gives a model."""
        self.image_token_id: int | None = None
        """Token whose positions take the rows of an image; None: the model reads none."""
        self.is_slow = False
        """Whether a short text took SLOW_SECONDS; see ``_encode``."""
        self._plain: Tokenizer | None = None
        self._special: re.Pattern[str] | None = None
        self._special_texts: frozenset[str] = frozenset()
        self._control: set[str] = set()
        """Texts that are never more than text in a conversation: special tokens, tags in the chat template that are
        one token, and those of ``protect``."""
        self._spelled: dict[str, list[int]] = {}
        """Their token ids as plain text."""
        if tokenizer is None:
            return
        # A tokenizer.json may hold truncation and padding settings of its training, which a server must not apply.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._special_texts = frozenset(token.content for token in added.values() if token.special)
        # Other added tokens, such as those of HTML in Gemma's vocabulary, are a way to write text.
        written = "" if template is None else template.source
        tags = {token.content for token in added.values() if _is_tag(token.content) and token.content in written}
        self.protect(self._special_texts | tags)
        self._markers: list[str] = []  # they are not among these
        if self._special_texts:
            self._plain = Tokenizer.from_str(tokenizer.to_str())
            self._plain.encode_special_tokens = True

    @classmethod
    def load(cls, folder: Path, chat_template: str = "") -> "TextIn":
        """Load ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``, each if it exists.

        ``chat_template``: source of a template that replaces the checkpoint's.

        Raises:
            ConfigError: one of them cannot be used, with its path.
        """
        path = folder if is_gguf(folder) else folder / TOKENIZER
        try:
            text = read_description(folder, TOKENIZER)
            if text is None:
                log.warning(why_no_tokenizer(folder))
                return cls()
            with _without_stderr():
                tokenizer = Tokenizer.from_str(text)
        except (ConfigError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the library raises nothing narrower, and its panics are not subclasses of Exception
            raise ConfigError(f"{path}: cannot be read as a tokenizer") from None
        check_token_ids(text, path)
        with _without_stderr():
            check_speed(tokenizer, path)
        config = read_config(folder)
        text_in = cls(tokenizer, load_template(folder, config, chat_template))
        text_in.response_template = config.get("response_template")
        text_in.input_names = config.get("model_input_names")
        text_in.truncation_side = "left" if config.get("truncation_side") == "left" else "right"
        kind = config.get("tokenizer_class")
        named = {"tokenizer_class": kind} if isinstance(kind, str) else {}
        text_in.tokenizer_info = named | special_variables(config)
        return text_in

    def protect(self, texts: Iterable[str]) -> None:
        """Make texts plain text in a request's conversation. Two texts are the markers of thinking."""
        texts = [text for text in texts if text]
        self._markers = texts if len(texts) == 2 else []
        self._spelled.clear()
        self._protect_also(texts)

    def read_images(self, token_id: int) -> None:
        """Prepare for images, whose rows are at the positions of this token.

        Raises:
            ConfigError: there is a tokenizer, and it has no such token.
        """
        self.image_token_id = token_id
        if self.tokenizer is not None:
            text = self.tokenizer.id_to_token(token_id)
            if text is None:
                raise ConfigError(f"the tokenizer has no token {token_id}, which config.json names for images")
            self._protect_also([text])

    def _protect_also(self, texts: Iterable[str]) -> None:
        self._control.update(texts)
        self._special_besides = special_pattern(self._control.difference(self._markers))
        self._special = special_pattern(self._control)

    @property
    def special_tokens(self) -> dict[int, str]:
        added = {} if self.tokenizer is None else self.tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token. A text with more characters per token of context cannot fit."""
        if self.tokenizer is None:
            return 1
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a raw prompt. ``param``: its request field, for errors.

        ``max_tokens`` is the context length: text that certainly exceeds it is refused before all of it is tokenized.
        The result may still exceed it; the caller checks the length.

        Raises:
            InvalidRequest: there is no tokenizer, or the text is too long or not encodable (a lone surrogate).
        """
        tokenizer = self._require_tokenizer(param)
        if max_tokens is not None:
            self._refuse_overlong(tokenizer, text, max_tokens, param)
        return self._encode(tokenizer, text, add_special_tokens, param)

    def encoding(
        self, text: str, *, max_tokens: int | None = None, param: str = "prompt", is_plain: bool = False
    ) -> Encoding:
        """Return the tokens of a raw text, without special tokens around it, and their offsets in characters.

        Otherwise as ``encode``. ``is_plain``: special tokens in the text stay plain text.
        """
        tokenizer = self._require_tokenizer(param)
        if max_tokens is not None:
            self._refuse_overlong(tokenizer, text, max_tokens, param)
        used = self._plain if is_plain and self._plain is not None else tokenizer
        return self._encoding(used, text, False, param, with_places=True)

    def encode_chat(self, messages: list[Message], options: ChatOptions, max_tokens: int) -> list[int]:
        """Return the token ids of a conversation; see ``render_chat``."""
        return self.encode_conversation(self.render_chat(messages, options, max_tokens))[0]

    def encode_conversation(self, rendered: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a whole rendered conversation, and ranges, as ``encode_marked``.

        For models that read images, as with transformers' processors, the tokenizer adds its own special tokens if the
        template has not written the first of them.
        """
        ids, spans = self.encode_marked(rendered)
        before, after = self.added_to(rendered)
        return [*before, *ids, *after], [(begin + len(before), end + len(before)) for begin, end in spans]

    def added_to(self, rendered: str) -> tuple[list[int], list[int]]:
        """Return the special tokens that ``encode_conversation`` adds before and after a conversation."""
        start = self.tokenizer_info.get("bos_token")
        if self.image_token_id is None or (start and rendered.startswith(start)):
            return [], []
        return self._added

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after a text."""
        tokenizer = self._require_tokenizer("messages")
        plain, whole = (self._encode(tokenizer, "a", add_special_tokens) for add_special_tokens in (False, True))
        begin = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:begin], whole[begin + len(plain) :]

    def render_chat(self, messages: list[Message], options: ChatOptions, max_tokens: int) -> str:
        """Return the text of a conversation for ``encode_rendered``. ``max_tokens``: as for ``encode``.

        Raises:
            InvalidRequest: no tokenizer, no template, the template refuses the messages or leaves out an image, or they
                are too long.
        """
        tokenizer = self._require_tokenizer("messages")
        if self.template is None:
            raise InvalidRequest(NO_TEMPLATE, "messages")
        images = options.images
        if images.stored:
            if (placeholder := images.stored[0].placeholder) not in self._control:
                self._protect_also([placeholder])
            if images.num_rows > max_tokens:
                raise context_length_exceeded(max_tokens, f"at least {images.num_rows}", "messages")
        try:
            given = mark_special([messages, options.tools, options.variables], None)
            marked = self._marked(given)
            texts = [
                self.template.render(
                    Conversation(
                        messages=messages,
                        add_generation_prompt=options.add_generation_prompt,
                        continue_final_message=options.continue_final_message,
                        variables=dict(variables or {}),
                        tools=tools,
                        max_chars=2 * max_tokens * self.max_token_chars,  # with marks; the text alone is checked below
                    )
                )
                for messages, tools, variables in ([given] if marked == given else [given, marked])
            ]
            text = expanded(with_marks(*texts) if len(texts) > 1 else texts[0], images.stored)
        except RenderedTooLong:
            raise context_length_exceeded(max_tokens, f"more than {max_tokens}", "messages") from None
        except RecursionError:
            raise InvalidRequest("messages are nested too deeply", "messages") from None
        self._refuse_overlong(tokenizer, text, max_tokens, "messages")
        return text

    def _marked(self, given: list[Any]) -> list[Any]:
        """Return messages, tools and variables with marks around text that stays plain.

        The thinking markers of an earlier answer have none up to the last end of thoughts: they are the model's own,
        which clients of servers without a reasoning parser send back. Later ones could leave thoughts open for what
        follows.
        """
        if self._special is None:
            return given
        marked: list[Any] = mark_special(given, self._special)
        end = self._markers[1] if self._markers else ""
        for message, made in zip(given[0], marked[0], strict=True):
            if isinstance(message.get("content"), list):
                mark_parts(made["content"], message["content"], self._special)
            content = message.get("content") if message.get("role") == "assistant" else None
            if isinstance(content, str) and end and end in content:
                cut = content.rindex(end) + len(end)
                kept = mark_special(content[:cut], self._special_besides)
                made["content"] = kept + mark_special(content[cut:], self._special)
        return marked

    def marked(self, text: str, max_tokens: int) -> str:
        """Return a text for a place in a rendered conversation, with marks; raise InvalidRequest if it is too long."""
        self._refuse_overlong(self._require_tokenizer("messages"), text, max_tokens, "messages")
        plain: str = mark_special(mark_special(text, None), self._special)
        return plain

    def prepare(self) -> None:
        """Start the template's helper processes, so that the first conversation does not wait for them."""
        if self.template is not None:
            self.template.prepare()

    def close(self) -> None:
        """End the template's helper processes."""
        if self.template is not None:
            self.template.close()

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        ids = list(token_ids)
        if len(ids) > LONG_IDS:  # as in _encode
            return str(self.tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0])
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _refuse_overlong(self, tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
        """Raise InvalidRequest if the text certainly has more than ``max_tokens`` tokens.

        The work is bounded by the context length, not the text's length. The longest token alone is a weak bound: some
        vocabularies have a few very long tokens, so prefixes of the text are tokenized too.
        """
        if len(text) > max_tokens * self.max_token_chars:
            raise context_length_exceeded(max_tokens, f"at least {len(text) // self.max_token_chars}", param)
        length = PROBED_CHARS_PER_TOKEN * max_tokens
        while length < len(text):
            # Cutting the text may split one long token into many short ones, and change a few tokens before it.
            too_many = 2 * max_tokens + 4 * self.max_token_chars
            if len(self._encode(tokenizer, text[:length], False, param)) >= too_many:
                raise context_length_exceeded(max_tokens, f"more than {max_tokens}", param)
            length *= 4

    def encode_rendered(self, text: str) -> list[int]:
        """Encode text with marks around users' control tokens: marked parts as plain text, the rest as usual."""
        return self.encode_marked(text)[0]

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids as ``encode_rendered``, and the ranges of those that are text of a thinking marker.

        A template that splits strings can separate a pair of marks. A lone mark is removed, but still splits the text.
        """
        tokenizer = self._require_tokenizer("messages")
        if MARK_START not in text and MARK_END not in text:
            return self._encode(tokenizer, text, False), []
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for piece in re.split(f"({MARK_START}[^{MARK_START}{MARK_END}]*{MARK_END})", text):
            if piece.startswith(MARK_START) and piece.endswith(MARK_END):
                begin = len(ids)
                ids += self._encode_spelled(tokenizer, piece[1:-1])
                if piece[1:-1] in self._markers:
                    spans.append((begin, len(ids)))
                continue
            for part in re.split(f"[{MARK_START}{MARK_END}]", piece):
                ids += self._encode(tokenizer, part, False) if part else []
        return ids, spans

    def _encode_spelled(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the ids of a control token's text that are not the control token's."""
        if text not in self._spelled:
            spelled = self._spell(tokenizer, text)
            if text not in self._control:  # a template has changed it
                return spelled
            self._spelled[text] = spelled
        return self._spelled[text]

    def _spell(self, tokenizer: Tokenizer, text: str) -> list[int]:
        if text in self._special_texts and self._plain is not None:
            return self._encode(self._plain, text, False)
        # In two parts, the text is neither an added token nor the usual tokens of a marker.
        usual = self._encode(tokenizer, text, False)
        for cut in range(1, len(text)):
            ids = [*self._encode(tokenizer, text[:cut], False), *self._encode(tokenizer, text[cut:], False)]
            if ids != usual and text[cut:] not in self._control:
                return ids
        return [token for char in text for token in self._encode(tokenizer, char, False)]

    def _encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        ids: list[int] = self._encoding(tokenizer, text, add_special_tokens, param).ids
        return ids

    def _encoding(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str, *, with_places: bool = False
    ) -> Encoding:
        """Return the tokens of a text. ``with_places``: with their offsets in it.

        ``encode`` holds the interpreter lock until it is done, which would delay every other stream if the text is long
        or the tokenizer slow.
        """
        began = time.thread_time()
        try:
            if len(text) > LONG_TEXT_CHARS or self.is_slow:
                encode = tokenizer.encode_batch if with_places else tokenizer.encode_batch_fast
                return encode([text], add_special_tokens=add_special_tokens)[0]
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the library panics, not with an Exception, if a checkpoint's regex takes too long
            why = ": it is not valid Unicode text" if re.search("[\ud800-\udfff]", text) else ""
            raise InvalidRequest(f"the text cannot be tokenized{why}", param) from None
        finally:
            if len(text) <= LONG_TEXT_CHARS and not self.is_slow and time.thread_time() > began + SLOW_SECONDS:
                self.is_slow = True
                log.warning("the tokenizer is slow: every text is processed in a thread")

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(NO_TOKENIZER, param)
        return self.tokenizer


def context_length_exceeded(max_model_len: int, given: str, param: str) -> InvalidRequest:
    """Return the error for a prompt that leaves no room for one output token. ``given``: its number of tokens."""
    return InvalidRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {given} tokens, "
        f"and at most {max_model_len - 1} leave room for an answer.",
        param,
        "context_length_exceeded",
    )


def _is_tag(text: str) -> bool:
    """Whether the text has brackets around it."""
    return len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / TOKENIZER_CONFIG
    try:
        return msgspec.json.decode(read_description(folder, TOKENIZER_CONFIG) or "{}", type=dict[str, Any])
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        raise ConfigError(f"{path}: cannot be read as a JSON object") from None


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what is written to stderr: a panic of a Rust library prints many lines before it can be caught."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # stderr is closed, or there are no descriptors
        yield
        return
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
