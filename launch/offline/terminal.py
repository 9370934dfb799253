"""``quire generate`` and ``quire chat``: answers are streamed to stdout, everything else goes to stderr."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.launch.offline.lora_request import LoRARequest
from quire.launch.offline.remote import RemoteModel
from quire.launch.offline.request_output import RequestOutput
from quire.launch.offline.terminal_answer import OnText, TerminalAnswer, TerminalModel
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs


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
    with _model(args, options) as model:
        messages: list[dict[str, Any]] = []
        while line := _next_line() if args.prompt is None else args.prompt:
            messages.append({"role": "user", "content": line})
            answer = model.chat(messages, params, _on_text(args.json))
            _print(answer, args.json)
            messages.append({"role": "assistant", "content": answer.text})
            if args.prompt is not None:
                return


@contextmanager
def _model(args: argparse.Namespace, options: EngineOptions) -> Iterator[TerminalModel]:
    """Connect to the server at --url, or start an engine and end it afterwards.

    Raises:
        ConfigError: engine flags are combined with --url, or as of RemoteModel and LLM.
    """
    if args.url is not None:
        if args.lora is not None:
            raise ConfigError("--url cannot be combined with --lora: give the adapter's name on the server as MODEL")
        check_no_engine_flags(options)
        yield RemoteModel(args.url, options.model, args.server_key)
        return
    if sys.stderr.isatty():
        first = "compiles CPU kernels if this is the first start on this machine"
        print(f"starting the engine ({first}) ...", file=sys.stderr, flush=True)
    keywords = _keywords(options)
    adapter = None
    if args.lora is not None:
        adapter = LoRARequest(args.lora.absolute().name, 1, args.lora)
        keywords["enable_lora"] = True
    with LLM(**keywords) as llm:
        yield LocalModel(llm, adapter)


def check_no_engine_flags(options: EngineOptions) -> None:
    """Raise ConfigError for a setting of an engine, which the server at --url has already."""
    own = [name for name, value in _keywords(options).items() if value != getattr(EngineOptions(), name)]
    if set(own) - {"model"}:
        flag = sorted(set(own) - {"model"})[0].replace("_", "-")
        raise ConfigError(f"--url cannot be combined with --{flag}: the server has settings of its own")


def _next_line() -> str:
    """Return the next non-blank line, stripped; "" at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    for line in sys.stdin:
        if line.strip():
            return line.strip()
    return ""


def _keywords(options: EngineOptions) -> dict[str, Any]:
    return msgspec.structs.asdict(options)


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
