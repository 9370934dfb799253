"""The answers that a client may get: the tokens that follow from its prompt, in order, and one valid ending."""

from functools import reduce
from math import isclose
from typing import TYPE_CHECKING

import numpy as np
from fake_adapters import mix_of
from fake_items import mixes_of
from fake_worker import contexts_of, extend_context, next_token, pooled_row, prompt_logprobs_of, routed_row
from sim_model import best_two, candidates_of
from sim_scenario import SimRequest
from sim_settings import EOS, MAX_MODEL_LEN, VOCAB_SIZE

from quire.frontend.engine.session import ENGINE_FAULT, MAX_SCHEDULER_DEATHS
from quire.frontend.engine.update import Update
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason, Hypothesis
from quire.scheduler_proc.features.beams.search import BeamSearch

if TYPE_CHECKING:
    from sim_front import SimClient, SimFront
    from sim_world import World


LATE_S = 4.0
"""Most seconds between the commit of a token and its arrival at the client."""


def seen(world: "World", request: SimRequest) -> list[int]:
    """Return the prompt as the fake model sees it: images in place of tokens."""
    mixes = mixes_of(world.items_of(request))
    return [token ^ mixes.get(at, 0) for at, token in enumerate(request.prompt)]


def may_lose_items(world: "World", request: SimRequest, why: str) -> bool:
    """Whether a request may end for its images: after a fault, or since no step or pool has room for a whole one."""
    vision, items = world.config.model.vision, world.items_of(request)
    if why.startswith("item_too_large"):
        return bool(items) and vision is not None and not vision.is_causal
    return any(item.key in world.faults.bad_items for item in items)


def most_output_tokens(request: SimRequest, max_tokens: int) -> int:
    return min(request.max_tokens, min(MAX_MODEL_LEN, max_tokens + 1) - len(request.prompt))


def expected_answer(world: "World", request: SimRequest, known: list[int]) -> tuple[list[int], EndReason]:
    """Return the answer of an undisturbed engine.

    Args:
        known: output tokens with which the request was forked.
    """
    assert world.max_tokens is not None
    if request.task or request.beams:
        return [], EndReason.STOPPED
    context = reduce(extend_context, [*seen(world, request), *known], 0)
    limit = most_output_tokens(request, world.max_tokens)
    adapter = world.adapter_of(request)
    mix = 0 if adapter is None else mix_of(adapter.digest)
    answer, stops = list(known), {*request.stop_token_ids, *([] if request.ignore_eos else EOS)}
    while len(answer) < limit:
        token = next_token(context ^ mix, VOCAB_SIZE)
        answer.append(token & ~1 if request.even else token)
        context = extend_context(context, answer[-1])
        if answer[-1] in stops and len(answer) > request.min_tokens:
            return answer, EndReason.STOPPED
        if request.repetition and len(answer) < limit and _repeats_itself(answer, request.min_tokens):
            return answer, EndReason.REPETITION
    return answer, EndReason.LENGTH


def _repeats_itself(answer: list[int], min_tokens: int) -> bool:
    """Return whether an answer ends with the same one to three tokens twice."""
    return len(answer) >= min_tokens and any(
        len(answer) >= 2 * size and answer[-size:] == answer[-2 * size : -size] for size in (1, 2, 3)
    )


def searched(world: "World", request: SimRequest) -> list[Hypothesis]:
    """Return what the beam search of a request finds without a scheduler."""
    assert world.max_tokens is not None
    params, adapter = world.sampling_of(request), world.adapter_of(request)
    assert params.num_candidates is not None
    search = BeamSearch(params, frozenset(EOS), most_output_tokens(request, world.max_tokens))
    mix = 0 if adapter is None else mix_of(adapter.digest)
    contexts = [reduce(extend_context, seen(world, request), 0)]
    while True:
        found = [candidates_of(each ^ mix, params.num_candidates, even=request.even) for each in contexts]
        choice = search.step([[(token, float(np.float32(value))) for token, value in own] for own in found])
        if choice is None:
            return search.ended
        pairs = zip(choice.parents, choice.tokens, strict=True)
        contexts = [extend_context(contexts[parent], token) for parent, token in pairs]


def check_update(world: "World", client: "SimClient", update: Update) -> None:
    """Record an update. Raises AssertionError if a token is not the next one."""
    request = world.requests[client.request.name]
    want, _ = expected_answer(world, request, client.forked_tokens)
    first = len(client.tokens)
    client.tokens += update.token_ids
    assert client.tokens[first:] == want[first : len(client.tokens)], f"{request.name}: tokens differ from {first} on"
    _check_logprobs(seen(world, request), request, want, first, update)
    if update.prompt_logprobs is not None:
        ids, values, _ = (column.ravel().tolist() for column in update.prompt_logprobs.columns(1))
        _check_prompt(seen(world, request), request, ids, values, whole=bool(client.tokens))
    client.pooled += [] if update.pooled is None else update.pooled.tolist()
    client.experts += [] if update.routed_experts is None else update.routed_experts.tolist()
    num_known = len(request.prompt) + len(client.tokens)
    assert len(client.experts) < num_known, f"{request.name}: experts of its last token"
    client.hypotheses += update.hypotheses or []
    if update.ended is not None:
        client.ended, client.detail = update.ended, update.detail
        client.num_counted = update.num_output_tokens


def _check_logprobs(prompt: list[int], request: SimRequest, answer: list[int], first: int, update: Update) -> None:
    """Check one entry per token if requested: the token itself and the most likely ones. ``prompt``: as seen."""
    if request.logprobs is None or not update.token_ids:
        assert not update.logprobs, f"{request.name} got log probabilities that it did not request"
        return
    assert update.logprobs is not None and len(update.logprobs) == len(update.token_ids), (
        f"{request.name}: log probabilities are missing"
    )
    context = reduce(extend_context, [*prompt, *answer[:first]], 0)
    for token, entry in zip(update.token_ids, update.logprobs, strict=True):
        best = best_two(token, context, VOCAB_SIZE)
        entries = [(entry.token_id, entry.logprob), *entry.top[: request.logprobs]]
        assert entry.rank == 1 and len(entries) == 1 + request.logprobs, f"{request.name}: not the most likely token"
        for (token_id, value), (want_id, want) in zip(entries, [best[0], *best], strict=False):
            assert token_id == want_id and isclose(value, want, abs_tol=1e-4), (
                f"{request.name}: log probability differs"
            )
        context = extend_context(context, token)


def _check_prompt(
    seen_as: list[int], request: SimRequest, token_ids: list[int], values: list[float], *, whole: bool
) -> None:
    """``whole``: all must be there, since the first tokens are; a request that ended earlier may have only a part."""
    want = {at: (request.prompt[at], value) for at, (_, value) in prompt_logprobs_of(seen_as).items()}
    assert request.prompt_logprobs is not None and (len(token_ids) == len(want) or not whole), (
        f"{request.name}: part of the prompt's log probabilities is missing"
    )
    entries = list(zip(token_ids, values, strict=True))
    assert entries == [want[at] for at in sorted(want)][: len(entries)], (
        f"{request.name}: prompt log probabilities differ"
    )


def check_ending(world: "World", front: "SimFront", client: "SimClient") -> None:
    """Raise AssertionError if the request should not have ended in this way."""
    request = world.requests[client.request.name]
    name = request.name
    if isinstance(client.error, InvalidRequest):
        _check_rejection(world, front, client, client.error)
        return
    if isinstance(client.error, EngineError):
        assert world.fatal_error is not None, f"{name} got an engine error: {client.error}"
        return
    want, reason = expected_answer(world, request, client.forked_tokens)
    if client.ended is EndReason.ERROR:
        if client.detail.startswith("numerical_error"):
            assert name in world.faults.bad_logits, f"{name} ended for bad logits without a fault"
        elif client.detail.startswith("adapter_not_loaded"):
            assert _has_bad_adapter(world, request), f"{name} ended for its adapter without a fault"
        elif client.detail.startswith(("image_not_encoded", "item_too_large")):
            assert may_lose_items(world, request, client.detail), f"{name} ended for its images without a fault"
        elif client.detail == ENGINE_FAULT:
            deaths = sum(at >= client.last_token_at for at in front.scheduler_deaths)
            assert deaths >= MAX_SCHEDULER_DEATHS, f"{name} ended as the cause after {deaths} deaths of the scheduler"
        elif client.detail.startswith("engine_fault"):
            lost = sum(at > client.last_token_at - LATE_S for at in world.faults.losses.values())
            assert lost >= 3, f"{name} ended as the cause after {lost} losses"
        else:
            raise AssertionError(f"{name} ended with {client.detail!r}")
        return
    if request.beams:
        assert client.hypotheses == searched(world, request), f"{name}: another search than alone"
        assert client.num_counted == sum(len(each.tokens) for each in client.hypotheses)
        return
    assert client.ended is reason, f"{name} ended with {client.ended}, not {reason}"
    assert client.tokens == want, f"{name} got {len(client.tokens)} of {len(want)} tokens"
    assert client.num_counted == len(want), f"{name}: {client.num_counted} tokens are counted"
    _check_rows(world, client, [*seen(world, request), *want])
    if request.poison is not None:
        assert request.poison >= len(want), f"{name} did not kill a worker"


def _check_rows(world: "World", client: "SimClient", tokens: list[int]) -> None:
    """Check the pooled rows and the routed experts of a request that ended well, with these tokens."""
    request, pooling = world.requests[client.request.name], world.config.model.pooling
    contexts, adapter = contexts_of(tokens), world.adapter_of(request)
    assert client.experts == ([routed_row(c) for c in contexts[:-1]] if request.experts else []), "other experts"
    want = []
    if request.task:
        assert pooling is not None
        mix = 0 if adapter is None else mix_of(adapter.digest)
        contexts = contexts if request.task == "token_embed" else contexts[-1:]
        want = [pooled_row(c ^ mix, pooling.width(request.task, request.dimensions)) for c in contexts]
    assert client.pooled == want, f"{request.name}: other pooled rows"


def _check_rejection(world: "World", front: "SimFront", client: "SimClient", error: InvalidRequest) -> None:
    request = world.requests[client.request.name]
    num_received = len(client.tokens) - client.num_forked
    assert not num_received, f"{request.name} was rejected after {num_received} tokens: {error.code}"
    if error.code == "queue_full":
        assert world.config.max_num_queued_reqs
        assert front.submitted[request.name] == 1, f"{request.name} was rejected when it was resubmitted"
        return
    if error.code == "job_ended":
        others = [each for each in world.requests.values() if each.job == request.job and each.is_last_step]
        assert request.job and others, f"{request.name} was rejected as if its job had ended"
        return
    if error.code == "adapter_not_loaded":
        assert _has_bad_adapter(world, request), f"{request.name} was rejected for its adapter without a fault"
        return
    if error.code in ("image_not_encoded", "item_too_large"):
        assert may_lose_items(world, request, error.code), f"{request.name} was rejected for its images without a fault"
        return
    assert error.code == "kv_pool_too_small", f"{request.name} was rejected: {error.code}"
    assert world.max_tokens is not None and len(request.prompt) + (not request.task) > world.max_tokens


def _has_bad_adapter(world: "World", request: SimRequest) -> bool:
    adapter = world.adapter_of(request)
    return adapter is not None and adapter.digest in world.faults.bad_adapters
