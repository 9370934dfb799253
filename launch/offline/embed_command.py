"""``quire embed``: the vectors of the lines of a file, by an engine of this process or a running server."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import numpy.typing as npt

from quire.launch.config.command_line import check_no_settings, opened
from quire.launch.config.options import EngineOptions
from quire.launch.offline.llm import LLM
from quire.launch.offline.pooling_methods import PoolingOptions
from quire.launch.offline.remote import RemoteModel
from quire.protocol.errors import ConfigError, EngineError, InvalidRequest

CHUNK = 4096
"""Lines that are embedded before their vectors are written."""
CHUNK_CHARS = 2**21
"""Characters of these lines, unless it is one line: as JSON they are smaller than the largest body of a server."""

Vector = npt.NDArray[np.float32]
Embed = Callable[[list[str]], list[Vector | str]]
"""Returns the vector of each text, or the reason why it has none."""


def run(args: argparse.Namespace, options: EngineOptions) -> None:
    """Write the vector of each line, in order.

    Raises:
        ConfigError: a file or a flag cannot be used.
        InvalidRequest: a line is refused, with its number; the vectors of earlier chunks are written.
        EngineError: the engine or the server failed, or lines have no vector: those are written with an error.
    """
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(_input(args.file))
        output = stack.enter_context(opened("--output-file", args.output_file, "wb"))
        embed = stack.enter_context(_embedder(args, options))
        num_lines = num_failed = 0
        arrays: list[Vector | str] = []
        for texts in _chunks(lines):
            found = _embed_chunk(embed, texts, num_lines)
            num_failed += sum(isinstance(each, str) for each in found)
            if args.format == "npy":
                arrays += found
            else:
                for index, each in enumerate(found, num_lines):
                    output.write(_json_line(index, each))
                output.flush()
            num_lines += len(texts)
        if args.format == "npy":
            np.save(output, _stacked(arrays))
    if num_failed:
        raise EngineError(f"{num_failed} of {num_lines} lines have no vector")


def _embed_chunk(embed: Embed, texts: list[str], num_before: int) -> list[Vector | str]:
    try:
        return embed(texts)
    except InvalidRequest as refused:
        match = re.fullmatch(r"(?:prompts|input)\[(\d+)\]", refused.param or "")
        if match is None:
            raise
        line = f"line {num_before + int(match[1]) + 1}"
        raise InvalidRequest(refused.message.replace(match[0], line), line, refused.code) from None


def _json_line(index: int, found: Vector | str) -> bytes:
    content: dict[str, Any] = {"error": found} if isinstance(found, str) else {"embedding": found.tolist()}
    return msgspec.json.encode({"index": index, **content}) + b"\n"


def _stacked(found: list[Vector | str]) -> Vector:
    """Return the vectors as one array; those of failed lines are NaN."""
    size = next((len(each) for each in found if not isinstance(each, str)), 0)
    rows = [np.full(size, np.nan, np.float32) if isinstance(each, str) else each for each in found]
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)


def _decoded(lines: TextIO) -> Iterator[str]:
    try:
        yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{getattr(lines, 'name', 'the file')} cannot be read as text: {error}") from None


def _chunks(lines: TextIO) -> Iterator[list[str]]:
    """Return the lines without their ends, some at a time."""
    texts: list[str] = []
    num_chars = 0
    for line in _decoded(lines):
        text = line.rstrip("\r\n")
        if texts and (len(texts) == CHUNK or num_chars + len(text) > CHUNK_CHARS):
            yield texts
            texts, num_chars = [], 0
        texts.append(text)
        num_chars += len(text)
    if texts:
        yield texts


@contextlib.contextmanager
def _embedder(args: argparse.Namespace, options: EngineOptions) -> Iterator[Embed]:
    if args.url is not None:
        check_no_settings(options, allowed=("model",))
        remote = RemoteModel(args.url, options.model, args.server_key)
        given = {
            "dimensions": args.dimensions,
            "truncate_prompt_tokens": args.truncate_prompt_tokens,
            "prompt_name": args.prompt_name,
        }
        fields = {name: value for name, value in given.items() if value is not None}

        def ask(texts: list[str]) -> list[Vector | str]:
            found = remote.embed(texts, fields)
            return [each if isinstance(each, str) else np.frombuffer(each, "<f4") for each in found]

        yield ask
        return
    more: PoolingOptions = {}
    if args.truncate_prompt_tokens is not None:
        more["truncate_prompt_tokens"] = args.truncate_prompt_tokens
    with LLM(**msgspec.structs.asdict(options)) as llm:

        def embed(texts: list[str]) -> list[Vector | str]:
            outputs = llm.embed(texts, dimensions=args.dimensions, prompt_name=args.prompt_name, **more)
            return [each.error or "failed" if each.outputs is None else each.outputs.embedding for each in outputs]

        yield embed


@contextlib.contextmanager
def _input(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdin
        return
    try:
        file = Path(name).open(encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{name} cannot be read as text: {error}") from None
    with file:
        yield file
