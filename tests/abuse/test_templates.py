"""Malicious templates, and requests that misuse a good one: only that request fails, in time, without revealing
internals."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from abuse import CHAT, MESSAGES, AbusedServer, short
from abused_app import AbusedApp
from engine_processes import engine_processes, processes_of
from grammar_cases import DEMO
from tiers import thinned
from waits import wait_for

from quire.frontend.text.chat_template import CANNOT_RENDER, Conversation, RenderedTooLong, check_template
from quire.frontend.text.template_helper import WALL_SECONDS, TemplateHelper
from quire.frontend.text.text_in import ChatOptions, TextIn
from quire.protocol.errors import ConfigError, EngineError, InvalidRequest

HELPER = "quire.frontend.text.template_helper"
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]

LOOP = "{% for a in range(99999) %}"
FAILS = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by filter": "{{ ''|attr('__class__')|attr('__mro__') }}x{{ (''|attr('__class__')).x.y }}",
    "globals of a function": "{{ raise_exception.__globals__['os'].system('id') }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__.x }}",
    "the environment": "{{ self._TemplateReference__context.environment.x }}",
    "cycler's globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "lipsum's globals": "{{ lipsum.__globals__.os.popen('id').read() }}",
    "a format string": "{{ '{0.__class__.__mro__}'.format('').x.y }}{{ ''.__class__.x }}",
    "a format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}{{ 1 / 0 }}",
    "an import": "{% import 'os' as os %}{{ os.system('id') }}",
    "an include": "{% include '/etc/passwd' %}",
    "an extension": "{% extends 'base' %}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "a division": "{{ 1 / 0 }}",
    "what is not there": "{{ a.b.c }}",
    "a wide range": "{% for i in range(10**9) %}x{% endfor %}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a lone surrogate": r"{{ '\ud800' }}",
    "a wrong type": "{{ messages + 1 }}",
}
TAKES_FOR_EVER = {
    "loops without output": LOOP * 4 + "{% endfor %}" * 4,
    "loops with little output": LOOP * 3 + "{% if a == 99998 %}x{% endif %}" + "{% endfor %}" * 3,
    "a large power": "{% set n = namespace(x=3) %}{{ (n.x ** 99999999) % 7 }}",
    "a huge text": "{{ ('x' * (10 ** messages[0].content | length * 3)) | length }}",
    "a large text": "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a large list": "{{ ([0] * 10**10) | length }}",
    "a list that doubles": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "padding": "{{ '%999999999999d' % 1 }}",
    "a wide text": "{{ 'x' | center(10**11) }}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "a batch": "{{ messages | batch(10**9, 0) | list | length }}",
    "an indentation": "{{ 'x\n' * 10**6 | int | string | indent(10**9) }}" + LOOP * 3 + "{% endfor %}" * 3,
}
WRONG = ["{% if %}", "{{ x", "{% for %}", "{{ x|nonsense }}", "{{ x is nonsense }}", "{{" + "(" * 5000, "{% endfor %}"]


def either(sources: dict[str, str]) -> str:
    """Return a template that runs the source named by its first message."""
    branches = "".join(f"{{% if messages[0].content == {case!r} %}}{sources[case]}{{% endif %}}" for case in sources)
    return branches + "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def evil() -> Iterator[TemplateHelper]:
    helper = TemplateHelper(either(FAILS | TAKES_FOR_EVER), {"bos_token": "<s>"}, "test", cpu_seconds=0.25)
    yield helper
    helper.close()


@pytest.fixture(scope="module")
def one_helper() -> Iterator[TemplateHelper]:
    """A helper whose template is the text of the conversation, so that one process serves all cases."""
    source = "{{ messages[0].content }}"
    helper = TemplateHelper(source, {}, "test")
    yield helper
    helper.close()


def render(template: TemplateHelper, text: str = "hello", **more: Any) -> str:
    return template.render(Conversation(messages=[{"role": "user", "content": text}], **{"max_chars": 1000, **more}))


@pytest.mark.parametrize("case", [*thinned(FAILS, keep=5), *thinned(TAKES_FOR_EVER, keep=1)])
def test_malicious_template_fails_only_its_requests(case: str, evil: TemplateHelper) -> None:
    with pytest.raises((InvalidRequest, RenderedTooLong)) as refused:
        render(evil, case)
    if isinstance(refused.value, InvalidRequest):
        assert str(refused.value).startswith(CANNOT_RENDER) and refused.value.param == "messages"
    assert case in TAKES_FOR_EVER or str(refused.value) == CANNOT_RENDER
    assert render(evil, "good") == "good"


@pytest.mark.parametrize("source", WRONG, ids=short)
def test_invalid_template_is_refused_at_startup(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^a file: the chat template is not valid Jinja(: line 1: [^\n]+)?$"):
        check_template(source, "a file")


def test_output_is_limited(one_helper: TemplateHelper) -> None:
    assert render(one_helper, "x" * 1000) == "x" * 1000
    with pytest.raises(RenderedTooLong):
        render(one_helper, "x" * 1001)


def helper_processes(template: TemplateHelper) -> list[psutil.Process]:
    """Return the helper for short conversations and its child."""
    render(template)
    before = {process.pid for process in engine_processes(HELPER)}
    template.close()
    assert render(template)
    (parent,) = (p for p in engine_processes(HELPER) if p.pid not in before and p.ppid() == os.getpid())
    return [parent, *parent.children()]


def kill(process: psutil.Process, number: int) -> None:
    """Send signal ``number`` and wait until the process has exited."""
    process.send_signal(number)
    wait_until_ended(process)


def wait_until_ended(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)


def test_long_conversation_does_not_delay_a_short_one(one_helper: TemplateHelper) -> None:
    """Conversations with variables or long texts have another helper than plain short ones."""
    short_ones = helper_processes(one_helper)
    short_ones[1].send_signal(signal.SIGSTOP)
    own = {process.pid for process in engine_processes(HELPER)}
    assert render(one_helper, variables={"x": 1}) == "hello"
    assert render(one_helper, "x" * 100_000, max_chars=100_000) == "x" * 100_000
    new = [each for each in engine_processes(HELPER) if each.pid not in own and each.ppid() == os.getpid()]
    assert len(new) == 2, "a long conversation does not delay a short one with variables either"
    short_ones[1].send_signal(signal.SIGCONT)
    assert render(one_helper) == "hello"


@pytest.mark.parametrize("number", thinned([signal.SIGKILL, signal.SIGTERM], keep=1))
def test_killed_helper_fails_no_request(number: int, one_helper: TemplateHelper) -> None:
    for generation in (0, 1):
        kill(helper_processes(one_helper)[generation], number)
        assert render(one_helper) == "hello"


@pytest.mark.parametrize("generation", thinned([1, 0], keep=1), ids=["its child", "helper"])
def test_stopped_helper_is_replaced(generation: int, one_helper: TemplateHelper) -> None:
    """Before, the request failed after WALL_SECONDS."""
    helper, child = helper_processes(one_helper)
    if generation == 0:
        child.send_signal(signal.SIGSTOP)  # otherwise it answers while its parent is stopped
    [helper, child][generation].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert render(one_helper) == "hello"
    assert time.monotonic() - began < WALL_SECONDS / 2
    for process in (helper, child):
        wait_until_ended(process)


SLOW = "{% for a in range(messages[0].content | length) %}{% for b in range(60000) %}{% endfor %}{% endfor %}done"
"""Takes 1 to 3 ms of CPU time for each character of the first message."""


def render_while(template: TemplateHelper, disturb: Callable[[psutil.Process], None], chars: int, times: int) -> str:
    """Render ``chars`` characters by SLOW, and call ``disturb`` with the child that renders, ``times`` times."""
    helper = helper_processes(template)[0]
    with ThreadPoolExecutor(1) as thread:
        rendering = thread.submit(render, template, "x" * chars)
        seen: set[int] = set()
        while len(seen) < times and not rendering.done():
            for child in helper.children():
                with contextlib.suppress(psutil.Error):
                    if child.pid not in seen and is_rendering(child):
                        seen.add(child.pid)
                        disturb(child)
        return rendering.result()


def is_rendering(child: psutil.Process) -> bool:
    """Whether it has run for a while; one that waits for a question has used less."""
    time.sleep(0.001)
    return child.cpu_times().user >= 0.03


@pytest.fixture
def slow() -> Iterator[TemplateHelper]:
    helper = TemplateHelper(SLOW, {}, "test", cpu_seconds=60.0)
    yield helper
    helper.close()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGSTOP])
def test_helper_that_ends_while_it_renders_is_tried_once_more(number: int, slow: TemplateHelper) -> None:
    """The crash may have an outer cause. Before, the client got 400 for a template that is fine."""
    assert render_while(slow, lambda child: child.send_signal(number), chars=400, times=1) == "done"


def test_template_that_crashes_the_helper_twice_is_refused(slow: TemplateHelper) -> None:
    with pytest.raises(InvalidRequest, match=f"{CANNOT_RENDER} in bounded memory"):
        render_while(slow, lambda child: child.send_signal(signal.SIGSEGV), chars=9999, times=2)
    assert render(slow) == "done"


def test_starved_helper_is_not_a_client_error(one_helper: TemplateHelper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is 503, not 400."""
    helper_processes(one_helper)[1].send_signal(signal.SIGSTOP)
    with monkeypatch.context() as hurried, pytest.raises(EngineError):
        hurried.setattr("quire.frontend.text.template_helper.WALL_SECONDS", 0.05)
        render(one_helper)
    assert render(one_helper) == "hello"


# ---- client text in all parts of a conversation


def placed(text: str) -> list[tuple[list[Any], ChatOptions]]:
    """Return conversations with ``text`` in every place that a client can write to."""
    user = [{"role": "user", "content": "x"}]
    tool = {"name": text, "description": text, "parameters": {text: {"enum": [text]}}}
    return [
        ([{"role": "user", "content": text}], ChatOptions()),
        ([{"role": "system", "content": text}, *user], ChatOptions()),
        ([{"role": "assistant", "content": "x", "reasoning_content": text}, *user], ChatOptions()),
        ([{"role": "user", "content": "x", "name": text}], ChatOptions()),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {text: text}}]}, *user], ChatOptions()),
        (user, ChatOptions(tools=[tool])),
        (user, ChatOptions(variables={"style": text})),
        (user, ChatOptions(variables={text: {text: [text]}})),
    ]


@pytest.fixture(scope="module")
def demo_text() -> Iterator[TextIn]:
    text_in = TextIn.load(DEMO)
    assert text_in.template is not None
    text_in.template.close()
    source = "{{ '<|im_start|>' ~ (messages | tojson) ~ (tools | tojson) ~ style ~ '<|im_end|>' }}"
    text_in.template = TemplateHelper(source, {}, "test")
    yield text_in
    text_in.close()


MARKS = ["\ue0f0", "\ue0f1", "\ue0f0{}\ue0f1", "\ue0f1{}\ue0f0", "{}\ue0f1\ue0f0{}", "\ue0f2CONTINUE\ue0f3{}"]


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("form", thinned(["{}", "a{}b", "{}{}", *MARKS], keep=2), ids=ascii)
def test_special_tokens_in_text_stay_text(form: str, place: int, demo_text: TextIn) -> None:
    for special in SPECIAL:
        messages, options = placed(form.replace("{}", special))[place]
        ids = demo_text.encode_chat(messages, options, 2000)
        assert [token for token in ids if token <= 2] == [1, 2]


# ---- on a running server


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": [value]}
    return value


ODD_KWARGS: list[Any] = [
    *({}, {"n": 10**9}, {"n": 2**63}, {"n": -(2**63)}, {"n": 1e300}, {"": ""}, {"__class__": "x"}, {"self": 1}),
    *({"loop": 1}, {"range": 7}, {"namespace": None}, {"raise_exception": "x"}, {"bos_token": "<|im_end|>"}),
    *({"x": "\x00\u2028\ufffd"}, {"x": "x" * 10**6}, {"x": list(range(50_000))}, {f"k{i}": i for i in range(20_000)}),
    *({"x" * 100_000: 1}, deep(50), deep(400), {"{{ 7 }}": "{{ 7 * 7 }}"}, {"caller": 1, "super": 2, "varargs": 3}),
]


def test_odd_variables_are_harmless(app: AbusedApp) -> None:
    plain = app.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    for kwargs in ODD_KWARGS:
        response = app.chat(chat_template_kwargs=kwargs)
        assert response.status_code in (200, 400, 413)
        if response.status_code == 200:
            assert list(app.engine.added[-1].prompt) == plain


def helper_of(server: AbusedServer) -> Any:
    """Return the helper for short conversations of the only front end."""
    helpers = processes_of(server.served.process.pid, HELPER)
    fathers = [p for p in helpers if p.ppid() not in {helper.pid for helper in helpers}]
    return min(fathers, key=lambda process: process.create_time())


@pytest.mark.full
@pytest.mark.parametrize("number", thinned([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT], keep=1))
@pytest.mark.parametrize("generation", thinned([0, 1], keep=1), ids=["helper", "its child"])
def test_killed_helper_is_replaced(number: int, generation: int, server: AbusedServer) -> None:
    assert server.chat().status_code == 200
    helper = helper_of(server)
    kill([helper, *helper.children()][generation], number)
    first = server.client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2})
    assert first.status_code in (200, 400), "at most the current request fails"
    assert server.client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2}).status_code == 200


def test_checkpoint_with_a_malicious_template_is_served(tmp_path: Path) -> None:
    """Loading the checkpoint does not run the template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ 9 ** 9 ** 9 }}{{ 'x' * 10 ** 13 }}")
    text_in = TextIn.load(tmp_path)
    with pytest.raises(InvalidRequest, match=CANNOT_RENDER):
        text_in.encode_chat([{"role": "user", "content": json.dumps({})}], ChatOptions(), 100)
    text_in.close()
