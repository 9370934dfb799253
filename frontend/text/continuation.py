"""Conversations that continue tokens so far, in which answers are exactly as they were sampled.

A template would write some answers otherwise, such as thoughts, which many leave out of earlier turns, and a tokenizer
may split a text otherwise than the model did.
"""

from dataclasses import replace

from quire.frontend.text.chat_template import Message
from quire.frontend.text.image_parts import MessageImages
from quire.frontend.text.message_form import INSTRUCTIONS
from quire.frontend.text.prompts import ModelLimits, Prompt, conversation_prompt, moved
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.arrays import Int32

LAST_TEXT = "quire-continues-here"
"""Content of the message that stands for the last turn. Templates that trim messages leave it as it is."""
BEFORE = {"assistant": ("user",), "tool": ("user", "assistant")}
"""Roles of the turns that templates expect before a turn of each role."""


def encode_continuation(
    messages: list[Message],
    last_role: str,
    answered_with: int | None,
    options: ChatOptions,
    text_in: TextIn,
    limits: ModelLimits,
) -> Prompt:
    """Return the tokens that continue a conversation, without those of the conversation so far: what the chat template
    writes after it. The earlier messages are not needed.

    Args:
        messages: the further messages, the result of ``check_messages``.
        last_role: role of the last turn so far.
        answered_with: the last token of that turn, if the model has sampled it; the end of the turn follows, of which
            a special token is not repeated that the answer ends with. None: the turn is as the template has written it.

    Raises:
        InvalidRequest: as ``encode_messages``, or the template does not write earlier messages as they are.
    """
    before: list[Message] = [{"role": role, "content": "-"} for role in BEFORE.get(last_role, ())]
    before.append({"role": last_role, "content": LAST_TEXT})
    rendered = text_in.render_chat([*before, *messages], options, limits.max_model_len)
    _, found, rest = rendered.partition(LAST_TEXT)
    is_kept = True
    if answered_with is None:
        alone_options = replace(options, add_generation_prompt=False, images=MessageImages())
        alone = text_in.render_chat(before, alone_options, limits.max_model_len)
        end = alone.partition(LAST_TEXT)[2]
        is_kept = LAST_TEXT in alone and rest.startswith(end)
        rest = rest[len(end) :]
    given = [message for message in messages if message["role"] in INSTRUCTIONS]
    if given:
        # They may be written in front of the conversation, where the tokens so far are fixed.
        probe = [{**message, "content": "quire-instructs"} if message in given else message for message in messages]
        written = text_in.render_chat([*before, *probe], options, limits.max_model_len).partition(LAST_TEXT)[2]
        is_kept = is_kept and written.count("quire-instructs") == len(given)
    if not found or not is_kept:
        text = "this model's chat template does not write earlier turns as they are: send whole conversations, without "
        raise InvalidRequest(f"{text}session", "session", "unsupported")
    ids, plain = text_in.encode_marked(rest)
    if ids and ids[0] == answered_with and answered_with in text_in.special_tokens:
        del ids[0]
        plain = moved(plain, -1)
    return conversation_prompt(ids, plain, rendered, options, text_in, limits)


def encode_extended(
    messages: list[Message], so_far: Int32, options: ChatOptions, text_in: TextIn, limits: ModelLimits
) -> Prompt:
    """Encode a conversation as ``encode_messages`` does, but keep the tokens so far if it begins with their text."""
    rendered = text_in.render_chat(messages, options, limits.max_model_len)
    before, _ = text_in.added_to(rendered)
    own, num_before = so_far.tolist(), len(before)
    known = text_in.decode(own[num_before:], skip_special_tokens=False) if own[:num_before] == before else ""
    if known and rendered.startswith(known):
        ids, plain = text_in.encode_marked(rendered[len(known) :])
        ids, plain = [*own, *ids], moved(plain, len(own))
        # A sampled token of images is text in the answer, and would be a position in these tokens.
        if text_in.image_token_id is None or ids.count(text_in.image_token_id) == options.images.num_rows:
            return conversation_prompt(ids, plain, rendered, options, text_in, limits)
    ids, plain = text_in.encode_conversation(rendered)
    return conversation_prompt(ids, plain, rendered, options, text_in, limits)
