"""What-if runs: from a Workload, a Setup and a cost model to the record of a simulated run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.model.model_config import ModelConfig
from quire.replay.costs.cost import ConstantCost, CostModel
from quire.replay.costs.layers import is_layer_profile
from quire.replay.costs.models import find_model
from quire.replay.costs.parse import config_of, default_cost, parse_cost
from quire.replay.run.run_record import RunRecord
from quire.replay.simulate.program_score import ProgramScore
from quire.replay.simulate.setup import NOTHING, Setup, make_setup, resolve_machine
from quire.replay.simulate.simulator import Simulator
from quire.replay.workload.sources import source_of
from quire.replay.workload.workload import Call, Workload

DEFAULT_STEP_MS = 10.0


def prepare(
    workload: Workload, changes: Mapping[str, str], cost: str | None, base: Mapping[str, str] = NOTHING
) -> tuple[Setup, CostModel]:
    """Build the engine's setup and the cost model; each may depend on the other's settings.

    Args:
        changes, base: as of ``make_setup``.
        cost: the ``--cost`` text; None: a fit to the trace's own steps, the profile of a measured run, or else a
            default machine.

    Raises:
        ConfigError: an invalid setting or cost.
    """
    given = {**base, **changes}
    if cost is not None and "model" not in {*given, *workload.settings} and (config := config_of(cost)):
        workload = replace(workload, settings=workload.settings | {"model": _fit_longest(find_model(config), workload)})
    if cost is None and workload.format == "measured":
        cost = _measured_machine(workload)
    model, size, sharing, max_num_seqs = resolve_machine(workload, given)
    if cost is not None:
        machine = parse_cost(
            cost, tensor_parallel_size=size, model=model, expert_parallel=sharing, max_num_seqs=max_num_seqs
        )
        return make_setup(workload, changes, machine, base), machine
    if sharing:
        raise ConfigError("--set enable_expert_parallel needs the layer profile of the machine: --cost table:DIR")
    machine, note = _default_machine(workload, size, model)
    setup = make_setup(workload, changes, machine, base)
    setup.notes.append(note)
    return setup, machine


def _measured_machine(workload: Workload) -> str:
    """Return the ``--cost`` text of the profile in the folder of a measured run. Raises ConfigError without one."""
    if not is_layer_profile(Path(workload.source)):
        text = f"{workload.source}: no layer profile of the measured machine (profile_dense_tp1.csv, ...)"
        raise ConfigError(f"{text}: --cost is needed")
    return f"table:{workload.source}"


def _fit_longest(model: ModelConfig, workload: Workload) -> ModelConfig:
    """Extend the model's context to the longest call: a model named only by the cost must not reject prompts."""
    longest = max((call.num_prompt_tokens + call.num_output_tokens for call in workload.calls), default=2)
    return msgspec.structs.replace(model, max_position=max(model.max_position, longest))


def _default_machine(workload: Workload, size: int, model: ModelConfig) -> tuple[CostModel, str]:
    """Return the default cost model and a note about it."""
    try:
        machine = default_cost(workload, tensor_parallel_size=size, model=model)
    except ConfigError as error:
        if workload.format != "quire":  # only a fit may be replaced by a constant
            raise
        return ConstantCost(DEFAULT_STEP_MS), f"no --cost was given; every step takes {DEFAULT_STEP_MS:g} ms: {error}"
    return machine, f"no --cost was given: {machine.describe()}"


def run_workload(
    workload: Workload,
    setup: Setup,
    cost: CostModel,
    *,
    concurrency: int | None = None,
    closed_loop: bool = False,
    overlong: str = "refuse",
    reuse_answers: bool = False,
    no_hints: bool = False,
    progress: Callable[[float, int], None] | None = None,
) -> RunRecord:
    """Run all calls to their ends.

    Args:
        concurrency: number of calls in flight, regardless of their times; None: use the times.
        closed_loop: each turn arrives when the previous one has finished and its pause is over.
        overlong: calls longer than ``max_model_len`` are rejected (refuse), lose the end of their prompts (clip), or
            are removed (drop).
        reuse_answers: a next turn may find the previous answer in the prefix cache, if the trace shows that it
            contains it.
        no_hints: calls do not name their conversation; ``programs`` of the figures says which ones were found.
        progress: called from time to time with the virtual time in seconds and the number of finished calls.
    """
    if no_hints and not (setup.config.uses_programs and setup.config.enable_prefix_caching):
        text = "--no-hints needs --set scheduling_policy=program (or continuum), and enable_prefix_caching"
        raise ConfigError(f"{text}: otherwise the scheduler looks for no programs")
    if no_hints and setup.num_engines > 1:
        raise ConfigError("--no-hints needs --set data_parallel_size=1: programs of several engines are not compared")
    limit = setup.config.max_model_len
    calls = [call for call in workload.calls if call.num_prompt_tokens + call.num_output_tokens > limit]
    kept = _without_overlong(workload.calls, limit, overlong)
    record = RunRecord(
        title=f"{workload.format}: {_pace(concurrency, closed_loop)}",
        source=workload.source,
        cost=cost.describe(),
        settings=dict(setup.shown),
        notes=[*workload.notes, *setup.notes],
        block_size=setup.config.block_size,
        num_usable_blocks=setup.num_usable_blocks,
        max_num_batched_tokens=setup.config.step_tokens,
    )
    if calls:
        record.notes.append(f"{len(calls)} calls longer than max_model_len ({limit}): {_OVERLONG[overlong]}")
    record.extra["overlong"] = {"calls": len(calls), "policy": overlong}
    record.extra["generated"] = generated = _generated(kept, setup.config.block_size, reuse_answers)
    if generated["other_bound_tokens"]:
        record.notes.append(_generated_note(reuse_answers, generated["other_bound_tokens"]))
    source = source_of(kept, concurrency, closed_loop)
    if setup.num_engines > 1:
        from quire.replay.simulate.fleet import FleetSimulator  # one engine needs no router

        return FleetSimulator(setup, cost, source, record, reuse_answers=reuse_answers, progress=progress).run()
    score = ProgramScore() if no_hints else None
    record = Simulator(setup, cost, source, record, reuse_answers=reuse_answers, score=score, progress=progress).run()
    if score is not None:
        record.extra["programs"] = score.figures()
    return record


_OVERLONG = {"refuse": "rejected", "clip": "the end of their prompts was cut", "drop": "dropped"}


def _pace(concurrency: int | None, closed_loop: bool) -> str:
    if concurrency is not None:
        return f"concurrency {concurrency}"
    return "closed loop" if closed_loop else "open loop"


def _without_overlong(calls: Sequence[Call], limit: int, policy: str) -> list[Call]:
    """Return the calls to run, with changed copies where the policy requires them."""
    kept: list[Call] = []
    dropped: dict[int, Call] = {}
    for call in calls:
        fits = call.num_prompt_tokens + call.num_output_tokens <= limit
        if policy == "drop" and not fits:
            dropped[call.number] = _relinked(call, dropped)
        elif policy == "clip" and not fits and call.num_output_tokens < limit:
            kept.append(_clipped(call, limit - call.num_output_tokens))
        else:
            kept.append(_relinked(call, dropped))
    return kept


def _clipped(call: Call, num_prompt_tokens: int) -> Call:
    """Cut the end of the prompt; the text and the content of the answer are then unknown."""
    tokens = None if call.tokens is None else call.tokens[:num_prompt_tokens]
    return replace(call, num_prompt_tokens=num_prompt_tokens, tokens=tokens, text=None, answer=None)


def _relinked(call: Call, dropped: dict[int, Call]) -> Call:
    """Let a call that follows a dropped one follow that one's predecessor, after both pauses."""
    before = None if call.after is None else dropped.get(call.after)
    if before is None:
        return call
    if before.after is None:
        return replace(call, after=None, pause=0.0)
    return replace(call, after=before.after, pause=before.pause + call.pause)


def _generated(calls: Sequence[Call], block_size: int, reuse_answers: bool) -> dict[str, str | int]:
    """Return whether answers are reused, and the most hit tokens that the other choice would add or remove."""
    found = 0
    for call in calls:
        if call.answer is not None:
            end = min(call.num_prompt_tokens + call.num_output_tokens, len(call.answer.ids) * call.answer.unit)
            found += max(end // block_size - call.num_prompt_tokens // block_size, 0) * block_size
    return {"mode": "reused" if reuse_answers else "own", "other_bound_tokens": found}


def _generated_note(reuse_answers: bool, tokens: int | str) -> str:
    if reuse_answers:
        return f"turns reuse cached answers; without --reuse-answers at most {tokens} fewer prompt tokens would hit"
    return f"turns do not reuse cached answers; with --reuse-answers at most {tokens} more prompt tokens would hit"
