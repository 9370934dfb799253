"""``quire generate`` and ``quire chat``. Only the answer is written to stdout."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.launch.offline.request_output import RequestOutput
from quire.protocol.errors import ConfigError, EngineError
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import StructuredOutputs


def generate(args: argparse.Namespace, options: EngineOptions) -> None:
    """Complete ``--prompt`` as raw text."""
    params = _sampling(args)
    with LLM(**_keywords(options)) as llm:
        _print(llm.generate(args.prompt, params)[0], args.json)


def chat(args: argparse.Namespace, options: EngineOptions) -> None:
    """Answer ``--prompt``; without it, run a conversation with one message per line of input."""
    params = _sampling(args)
    with LLM(**_keywords(options)) as llm:
        if args.prompt is not None:
            _print(llm.chat([{"role": "user", "content": args.prompt}], params)[0], args.json)
            return
        messages: list[dict[str, Any]] = []
        while line := _next_line():
            messages.append({"role": "user", "content": line})
            output = llm.chat(messages, params)[0]
            _print(output, args.json)
            messages.append({"role": "assistant", "content": output.outputs[0].text})


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


def _print(output: RequestOutput, as_json: bool) -> None:
    answer = output.outputs[0]
    if answer.error is not None:
        raise EngineError(answer.error)
    if not as_json:
        print(answer.text, flush=True)
        return
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": output.num_cached_tokens,
    }
    shown = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "usage": usage,
    }
    print(msgspec.json.encode(shown).decode(), flush=True)
