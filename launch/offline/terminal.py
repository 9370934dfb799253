"""``quire generate`` and ``quire chat``: answers are streamed to stdout, everything else goes to stderr."""

import argparse
import base64
import contextlib
import mimetypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire.launch.config.command_line import check_no_settings
from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.launch.offline.lora_request import LoRARequest
from quire.launch.offline.remote import RemoteModel
from quire.launch.offline.request_output import RequestOutput
from quire.launch.offline.terminal_answer import OnText, TerminalAnswer, TerminalModel
from quire.protocol.errors import ConfigError, EngineError, InvalidRequest, counted
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # input() then edits lines and has a history

HELP = "/image FILE: add an image to the next message; /clear: forget the conversation; /exit, Ctrl-D: end; "
HELP += "Ctrl-C: end an answer; //text: text that begins with /"
COMMAND = re.compile(r"/(\w*)(?:\s|$)")
Images = list[tuple[Path, dict[str, Any]]]
"""Files of images, and each as a part of a message."""


class LocalModel:
    """A model in an engine of this process."""

    def __init__(self, llm: LLM, adapter: LoRARequest | None = None) -> None:
        self._llm = llm
        self._adapter = adapter

    def chat(self, messages: list[dict[str, Any]], params: SamplingParams, on_text: OnText) -> TerminalAnswer:
        return _answer(self._llm.chat(messages, params, **self._options(on_text))[0])

    def generate(self, prompt: str, params: SamplingParams, on_text: OnText) -> TerminalAnswer:
        return _answer(self._llm.generate(prompt, params, **self._options(on_text))[0])

    def _options(self, on_text: OnText) -> dict[str, Any]:
        return {"lora_request": self._adapter, "on_text": lambda prompt, text: on_text(text)}


def generate(args: argparse.Namespace, options: EngineOptions) -> None:
    """Complete ``--prompt`` as raw text."""
    params = _sampling(args)
    with _model(args, options) as model:
        _print(model.generate(args.prompt, params, _on_text(args.json)), args.json)


def chat(args: argparse.Namespace, options: EngineOptions) -> None:
    """Answer ``--prompt``; without it, run a conversation with one message per line of input."""
    params = _sampling(args)
    images = [_read_image(path) for path in args.image]
    with _model(args, options) as model:
        if args.prompt is None:
            _converse(model, params, args.json, images)
            return
        answer = _ask(model, [_message(args.prompt, images)], params, _on_text(args.json), images)
        _print(answer, args.json)


def _message(text: str, images: Images) -> dict[str, Any]:
    """Return a user's message, with the images before its text."""
    parts = [part for _, part in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if images else text}


def _ask(
    model: TerminalModel, messages: list[dict[str, Any]], params: SamplingParams, on_text: OnText, images: Images
) -> TerminalAnswer:
    """Return the answer. Errors name the files of the last message's ``images``, not its fields."""
    try:
        return model.chat(messages, params, on_text)
    except (ConfigError, InvalidRequest) as error:
        text = str(error)
        for i, (path, _) in enumerate(images):
            text = text.replace(f"messages[{len(messages) - 1}].content[{i}].image_url.url", str(path))
        raise ConfigError(text) from None


def _read_image(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a file and its part of a message. Raise ConfigError if it cannot be read."""
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    kind = mimetypes.guess_type(path.name)[0] or ""
    kind = kind if kind.startswith("image/") else "image/png"  # the content tells, not the name
    return path, {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def _converse(model: TerminalModel, params: SamplingParams, as_json: bool, images: Images) -> None:
    """Answer lines of input in turn until their end. On a terminal, Ctrl-C ends the answer only, and a message that is
    refused is forgotten.

    ``images``: of the first message.
    """
    messages: list[dict[str, Any]] = []
    parts: list[str] = []
    show = _on_text(as_json)

    def on_text(text: str) -> None:
        parts.append(text)
        show(text)

    while line := _next_line():
        if found := COMMAND.match(line):
            if found[1] == "exit":
                return
            if found[1] == "clear":
                messages.clear()
                images = []
            elif found[1] == "image" and (name := line.removeprefix("/image").strip()):
                try:
                    images = [*images, _read_image(Path(name).expanduser())]
                    print(f"{counted(len(images), 'image')} for the next message", file=sys.stderr)
                except ConfigError as error:
                    print(error, file=sys.stderr)
                continue
            elif found[1] != "help":
                print(f"unknown command /{found[1]}", file=sys.stderr)
            print("the conversation is empty" if found[1] == "clear" else HELP, file=sys.stderr)
            continue
        messages.append(_message(line.removeprefix("/") if line.startswith("//") else line, images))
        sent, images = images, []
        parts.clear()
        try:
            _print(_ask(model, messages, params, on_text, sent), as_json)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print(flush=True)
        except ConfigError as error:  # a file that is no image, for one
            if not sys.stdin.isatty():
                raise
            print(error, file=sys.stderr)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": "".join(parts)})


@contextmanager
def _model(args: argparse.Namespace, options: EngineOptions) -> Iterator[TerminalModel]:
    """Connect to the server at --url, or start an engine and end it afterwards.

    Raises:
        ConfigError: engine flags are combined with --url, or as of RemoteModel and LLM.
    """
    if args.url is not None:
        if args.lora is not None:
            raise ConfigError("--url cannot be combined with --lora: give the adapter's name on the server as MODEL")
        check_no_settings(options, allowed=("model",))
        yield RemoteModel(args.url, options.model, args.server_key)
        return
    if sys.stderr.isatty():
        first = "compiles CPU kernels if this is the first start on this machine"
        print(f"starting the engine ({first}) ...", file=sys.stderr, flush=True)
    keywords = msgspec.structs.asdict(options)
    adapter = None
    if args.lora is not None:
        adapter = LoRARequest(args.lora.absolute().name, 1, args.lora)
        keywords["enable_lora"] = True
    with LLM(**keywords) as llm:
        yield LocalModel(llm, adapter)


def _next_line() -> str:
    """Return the next non-blank line, stripped; "" at the end of input. A terminal gets a prompt."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        while True:
            if prompt and not sys.stdout.isatty():  # input() would write the prompt between the answers
                print(prompt, end="", file=sys.stderr, flush=True)
            if line := input(prompt if sys.stdout.isatty() else "").strip():
                return line
    except (EOFError, KeyboardInterrupt) as end:
        if prompt:
            print(file=sys.stderr)  # the prompt of the shell begins a line
        if isinstance(end, KeyboardInterrupt):
            raise
        return ""


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Raise ConfigError if the schema file cannot be read, InvalidRequest for a value out of range."""
    required = None
    if args.json_schema is not None and args.regex is not None:
        raise ConfigError("--json-schema and --regex cannot be combined")
    if args.json_schema is not None:
        required = StructuredOutputs(json=_read_schema(args.json_schema))
    elif args.regex is not None:
        required = StructuredOutputs(regex=args.regex)
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.sampling_seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
        structured_outputs=required,
        thinking_token_budget=args.thinking_token_budget,
    )


def _read_schema(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        msgspec.json.decode(text)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError):
        raise ConfigError(f"{path}: cannot be read as a JSON schema") from None
    return text


def _answer(output: RequestOutput) -> TerminalAnswer:
    """Return the first answer of ``output``. Raise EngineError if it failed."""
    answer = output.outputs[0]
    if answer.error is not None:
        raise EngineError(answer.error)
    return TerminalAnswer(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(answer.token_ids),
        cached_tokens=output.num_cached_tokens,
    )


def _on_text(as_json: bool) -> OnText:
    return (lambda text: None) if as_json else (lambda text: print(text, end="", flush=True))


def _print(answer: TerminalAnswer, as_json: bool) -> None:
    """End the streamed text with a newline, or print the whole answer as JSON."""
    print(msgspec.json.encode(answer.as_dict()).decode() if as_json else "", flush=True)
