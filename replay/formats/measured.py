"""Measured runs of vLLM, as LLMServingSim publishes them: a folder with the requests and the settings of the engine.

``workload.jsonl`` has the requests (``input_tok_ids``, ``output_toks``, ``arrival_time_ns``, which the load generator
planned), ``meta.json`` the settings, and ``requests.jsonl`` what was measured (``measured_results.py``). A layer
profile of the machine may be beside them.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from quire.protocol.errors import ConfigError
from quire.replay.formats.content import chain_ids
from quire.replay.formats.options import LoadOptions
from quire.replay.formats.read import AnswerLength, Faults, finish, read_lines, records
from quire.replay.recorded.decompress import find_file
from quire.replay.workload.workload import Call, ContentIds, Workload

REQUESTS, SETTINGS = "workload.jsonl", "meta.json"


class _Line(msgspec.Struct):
    input_tok_ids: list[int]
    output_toks: AnswerLength
    arrival_time_ns: float


class _EngineKwargs(msgspec.Struct):
    """The arguments that are settings of a simulation, too."""

    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None


class _KVCache(msgspec.Struct):
    num_gpu_blocks: int | None = None
    block_size: int | None = None


class _Meta(msgspec.Struct):
    model: str
    vllm_version: str
    engine_kwargs: _EngineKwargs
    kv_cache: _KVCache = msgspec.field(default_factory=_KVCache)


def is_measured(folder: Path) -> bool:
    return find_file(folder, REQUESTS) is not None and find_file(folder, SETTINGS) is not None


def load(path: Path, options: LoadOptions) -> Workload:
    """Load a run. Its settings are those that were measured, with the policies of its version of vLLM.

    Raises:
        ConfigError: a missing file or a bad line.
    """
    requests, meta_file = find_file(path, REQUESTS), find_file(path, SETTINGS)
    if requests is None or meta_file is None:
        raise ConfigError(f"{path}: {REQUESTS if requests is None else SETTINGS} not found")
    faults = Faults(options.lenient)
    meta = _meta(meta_file)
    unit = meta.kv_cache.block_size or 16
    calls = []
    for number, (line_number, line) in enumerate(records(requests, _Line, faults)):
        try:
            content = ContentIds(chain_ids(array("I", line.input_tok_ids), unit), unit)
        except OverflowError:
            faults.add(requests, line_number, "`input_tok_ids` must be between 0 and 2**32 - 1")
            continue
        num_prompt_tokens = faults.at_least_one_token(len(line.input_tok_ids), "prompt")
        num_output_tokens = faults.at_least_one_token(line.output_toks)
        calls.append(
            Call(number, f"{number}", line.arrival_time_ns / 1e9, num_prompt_tokens, num_output_tokens, content)
        )
    settings = {key: value for key, value in msgspec.structs.asdict(meta.engine_kwargs).items() if value is not None}
    settings |= {"model": meta.model, "like": f"vllm-{meta.vllm_version}", "block_size": unit}
    if meta.kv_cache.num_gpu_blocks:
        settings["num_usable_blocks"] = meta.kv_cache.num_gpu_blocks - 1
    return finish(Workload("measured", str(path), calls, settings), options, faults)


def _meta(path: Path) -> _Meta:
    text = b"\n".join(line for _, line in read_lines(path, Faults(False)))
    try:
        return msgspec.json.decode(text, type=_Meta)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from None
