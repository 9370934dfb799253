"""Agent requests as text: prompts and answers are tokenized here, and content ids are hashes of the tokens."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from quire.frontend.text.text_in import NO_TOKENIZER, TextIn
from quire.launch.config.model_folder import DEMO_MODEL
from quire.protocol.errors import ConfigError
from quire.replay.formats.content import chain_ids, set_answers
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import Faults, files_of, finish, records
from quire.replay.workload.workload import Call, ContentIds, Workload

_BATCH = 64


class _Line(msgspec.Struct):
    """A logged request; ``timestamp`` is microseconds since 1970."""

    timestamp: int | float
    input: str
    output: str
    session_id: str


def load(path: Path, options: LoadOptions) -> Workload:
    """Load a trace. The first request arrives at 0; the turns of a session are ordered by time.

    Raises:
        ConfigError: a bad line, or a missing tokenizer.
    """
    faults = Faults(options.lenient)
    lines: list[_Line] = []
    for file in files_of(path):
        for number, line in records(file, _Line, faults):
            if not 0 <= line.timestamp <= 2**62:
                faults.add(file, number, f"`timestamp` must be between 0 and 2**62 (got {line.timestamp})")
            else:
                lines.append(line)
    faults.num_earlier = sum(b.timestamp < a.timestamp for a, b in pairwise(lines))
    lines.sort(key=lambda line: line.timestamp)
    folder = options.tokenizer or DEMO_MODEL
    calls: list[Call] = []
    for line, tokens, num_output_tokens in _tokenize(lines, folder):
        call = Call(
            len(calls),
            f"{len(calls)}",
            (line.timestamp - lines[0].timestamp) / 1e6,
            faults.at_least_one_token(len(tokens), "prompt"),
            faults.at_least_one_token(num_output_tokens),
            ContentIds(chain_ids(tokens, options.block_size), options.block_size),
            line.session_id,
            tokens=tokens or array("i", [0]),
            text=line.input,
        )
        calls.append(call)
    _chain(calls)
    notes = [f"text is tokenized by the tokenizer of {'the demo model' if options.tokenizer is None else folder}"]
    notes.append("times are those of logging: pauses in conversations include the time of the recorded answer")
    return finish(Workload("agent-text", str(path), calls, notes=notes), options, faults)


def _chain(calls: list[Call]) -> None:
    turns: dict[str, list[Call]] = {}
    for call in calls:
        before = turns.setdefault(call.conversation, [])
        if before:
            call.after, call.pause = before[-1].number, call.arrival - before[-1].arrival
        before.append(call)
    for conversation in turns.values():
        set_answers(conversation)


def _tokenize(lines: list[_Line], folder: Path) -> list[tuple[_Line, array[int], int]]:
    """Return each line with its prompt's tokens and its answer's length."""
    tokenizer = TextIn.load(folder).tokenizer
    if tokenizer is None:
        raise ConfigError(f"{folder}: {NO_TOKENIZER}")
    done = []
    for first in range(0, len(lines), _BATCH):
        batch = lines[first : first + _BATCH]
        prompts = _encode(tokenizer, [line.input for line in batch], add_special_tokens=True)
        answers = _encode(tokenizer, [line.output for line in batch], add_special_tokens=False)
        done += [(line, ids, len(answer)) for line, ids, answer in zip(batch, prompts, answers, strict=True)]
    return done


def _encode(tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[array[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [array("i", encoding.ids) for encoding in encodings]
