"""A measured run: a folder with the requests that an engine was driven with, and what it ran by."""

import math
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.launch.replay.core.policies import find_preset
from quire.launch.replay.costs.models import find_model
from quire.launch.replay.formats.content import chain_ids
from quire.launch.replay.formats.options import LoadOptions
from quire.launch.replay.formats.read import (
    AnswerLength,
    Faults,
    PromptLength,
    at_least_one_token,
    empty_notes,
    finish,
    order_notes,
    read_whole,
    records,
)
from quire.launch.replay.workload.workload import Call, Content, Workload
from quire.protocol.errors import ConfigError

_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "tensor_parallel_size",
    "block_size",
    "enable_prefix_caching",
)
_RESOLVED = ("scheduler_config", "cache_config", "model_config", "parallel_config")
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Line(msgspec.Struct):
    input_toks: PromptLength
    output_toks: AnswerLength
    arrival_time_ns: _Nanoseconds
    input_tok_ids: list[int] | None = None
    output_tok_ids: list[int] | None = None


class _Seen(msgspec.Struct):
    """What became of a request; ``queued_ts``: seconds on the engine's monotonic clock."""

    queued_ts: float
    input_toks: PromptLength


def find(folder: Path, name: str) -> Path | None:
    """The file of that name in ``folder``, plain or compressed."""
    return next((f for end in ("", ".gz", ".xz", ".zst") if (f := folder / (name + end)).is_file()), None)


def load(path: Path, options: LoadOptions) -> Workload:
    """``path``: the folder, or its ``workload.jsonl``.

    Raises:
        ConfigError: a file is missing or bad, or times decrease (lenient: they are sorted).
    """
    folder = path if path.is_dir() else path.parent
    file = find(folder, "workload.jsonl") if path.is_dir() else path
    if file is None or not file.is_file():
        raise ConfigError(f"{path}: there is no workload.jsonl")
    faults = Faults(options.lenient)
    workload = Workload("measured", str(path), [])
    meta = find(folder, "meta.json")
    if meta is not None:
        told = _decode_meta(meta)
        workload.settings = settings_of(told) | engine_of(told, workload.notes)
    untold = [key for key in (*_SETTINGS, "num_usable_blocks") if key not in workload.settings]
    if untold:
        workload.notes.append(f"the run does not tell {', '.join(untold)}")
    unit = math.gcd(workload.settings.get("block_size", 0), options.block_size)
    empty = [0]
    lines = list(records(file, _Line, faults))
    last = unsorted = 0
    for number, line in lines:
        call = _call(len(workload.calls), line, unit, file, number, faults, empty)
        if call is None:
            continue
        if line.arrival_time_ns < last:
            unsorted += 1
            if not options.lenient:
                faults.add(file, number, "`arrival_time_ns` is less than in the line before")
        last = max(last, line.arrival_time_ns)
        workload.calls.append(call)
    workload.notes += empty_notes(empty) + order_notes(unsorted)
    seen = find(folder, "requests.jsonl")
    if seen is not None:
        _take_queued(workload, seen, options, faults)
    elif options.queued:
        raise ConfigError(f"{folder}: there is no requests.jsonl, which would tell when requests were queued")
    return finish(workload, options, faults)


def settings_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine ran by: what it had resolved goes before what it was asked for."""
    resolved = _part(meta, "resolved_config")
    parts = [_part(resolved, name) for name in _RESOLVED]
    parts += [_part(meta, "kv_cache"), _part(meta, "engine_kwargs")]
    settings: dict[str, Any] = {}
    for key in (*_SETTINGS, "num_gpu_blocks"):
        value = next((part[key] for part in parts if isinstance(part.get(key), int) and part[key] >= 0), None)
        if value is not None:
            settings[key] = value
    if "num_gpu_blocks" in settings:
        settings["num_usable_blocks"] = settings.pop("num_gpu_blocks") - 1  # its block 0 is the null block
    return settings


def engine_of(meta: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Which model was served, and which engine's policies a replay has to have; ``notes``: where that is not known."""
    settings: dict[str, Any] = {}
    for key, name, find in (
        ("model", meta.get("model"), find_model),
        ("like", f"vllm-{meta['vllm_version']}" if "vllm_version" in meta else None, find_preset),
    ):
        if not isinstance(name, str):
            continue
        try:
            find(name)
        except ConfigError as error:
            notes.append(f"the run's {key} is not known here: {error}")
        else:
            settings[key] = name
    return settings


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = whole.get(key)
    return part if isinstance(part, dict) else {}


def _decode_meta(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_whole(file), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _call(index: int, line: _Line, unit: int, file: Path, number: int, faults: Faults, empty: list[int]) -> Call | None:
    tokens, answer = line.input_tok_ids, line.output_tok_ids
    if tokens is not None and len(tokens) != line.input_toks:
        faults.add(file, number, f"`input_tok_ids` has {len(tokens)} entries; `input_toks` is {line.input_toks}")
        return None
    call = Call(
        index,
        f"{index}",
        line.arrival_time_ns / 1e9,
        line.input_toks,
        at_least_one_token(line.output_toks, empty),
    )
    if tokens is not None:
        try:
            call.tokens = array("i", tokens)
            call.content = Content(chain_ids(tokens, unit), unit)
            if answer is not None and len(answer) == call.num_output_tokens:
                call.answer = Content(chain_ids(tokens + answer, unit), unit)
        except OverflowError:
            faults.add(file, number, f"token ids must be from 0 to {2**31 - 1}")
            return None
    return call


def _take_queued(workload: Workload, file: Path, options: LoadOptions, faults: Faults) -> None:
    """Times at which the engine had the requests: taken, or only told of."""
    seen = [record for _, record in records(file, _Seen, faults)]
    calls = workload.calls
    if [each.input_toks for each in seen] != [call.num_prompt_tokens for call in calls]:
        if options.queued:
            raise ConfigError(f"{file}: its requests are not those of the workload, one for one")
        workload.notes.append(f"{file.name} has other requests than the workload: it is not used")
        return
    if not calls:
        return
    shift = calls[0].arrival - seen[0].queued_ts
    times = [each.queued_ts + shift for each in seen]
    apart = max(abs(time - call.arrival) for time, call in zip(times, calls, strict=True))
    if options.queued:
        for call, time in zip(calls, times, strict=True):
            call.arrival = max(0.0, time)
        workload.notes.append(f"arrivals are when the engine had queued the requests ({file.name}, queued_ts)")
    else:
        workload.notes.append(
            f"arrivals are as the load generator had planned them (arrival_time_ns); counted from the first one, the "
            f"engine had queued them up to {apart:.3f} s apart from that ({file.name}, queued_ts)"
        )
