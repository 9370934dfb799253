"""What a client may get: the tokens that its prompt alone gives, in order and once, and one ending with a reason."""

from functools import reduce
from math import isclose
from typing import TYPE_CHECKING

from fake_worker import extend_context, next_token
from scheduler_load import EOS, MAX_MODEL_LEN, prompt_logprobs_of
from sim_model import best_two
from sim_scenario import VOCAB_SIZE, Ask

from quire.launch.frontend.engine_client import Update
from quire.launch.frontend.session import CONDEMNED, MAX_SCHEDULER_DEATHS
from quire.protocol.errors import EngineError, InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason

if TYPE_CHECKING:
    from sim_front import Reader, SimFront
    from sim_world import World


LATE_S = 4.0
"""A token that was committed may come to its client so much later."""


def right_answer(ask: Ask, max_tokens: int) -> tuple[list[int], EndReason]:
    """Of an engine whose pool holds ``max_tokens``, undisturbed."""
    prompt = ask.prompt
    context = 0
    for token in prompt:
        context = extend_context(context, token)
    limit = min(ask.max_tokens, min(MAX_MODEL_LEN, max_tokens + 1) - len(prompt))
    answer: list[int] = []
    while len(answer) < limit:
        token = next_token(context, VOCAB_SIZE)
        answer.append(token & ~1 if ask.even else token)
        context = extend_context(context, answer[-1])
        if not ask.ignore_eos and answer[-1] in EOS:
            return answer, EndReason.STOPPED
    return answer, EndReason.LENGTH


def note_update(world: "World", reader: "Reader", update: Update) -> None:
    """Raises AssertionError at a token that is not the next one."""
    ask = world.asks[reader.ask.name]
    assert world.max_tokens is not None
    want, _ = right_answer(ask, world.max_tokens)
    first = len(reader.tokens)
    reader.tokens += update.token_ids
    assert reader.tokens[first:] == want[first : len(reader.tokens)], f"{ask.name}: other tokens from {first} on"
    _check_logprobs(ask, want, first, update)
    if update.prompt_logprobs is not None:
        ids, values, _ = (column.ravel().tolist() for column in update.prompt_logprobs.columns(1))
        _check_prompt(ask, ids, values, whole=bool(reader.tokens))
    if update.ended is not None:
        reader.ended, reader.detail = update.ended, update.detail
        reader.num_counted = update.num_output_tokens


def _check_logprobs(ask: Ask, answer: list[int], first: int, update: Update) -> None:
    """One entry per token, if it asked for them: the token's own, and of as many best ones as there are of note."""
    if ask.logprobs is None or not update.token_ids:
        assert not update.logprobs, f"{ask.name} did not ask for log probabilities"
        return
    assert update.logprobs is not None and len(update.logprobs) == len(update.token_ids), f"{ask.name}: too few"
    context = reduce(extend_context, [*ask.prompt, *answer[:first]], 0)
    for token, told in zip(update.token_ids, update.logprobs, strict=True):
        best = best_two(token, context, VOCAB_SIZE)
        entries = [(told.token_id, told.logprob), *told.top[: ask.logprobs]]
        assert told.rank == 1 and len(entries) == 1 + ask.logprobs, f"{ask.name}: it is not the best"
        for (token_id, value), (want_id, want) in zip(entries, [best[0], *best], strict=False):
            assert token_id == want_id and isclose(value, want, abs_tol=1e-4), f"{ask.name}: another log probability"
        context = extend_context(context, token)


def _check_prompt(ask: Ask, token_ids: list[int], values: list[float], *, whole: bool) -> None:
    """``whole``: it comes with the first tokens; one that ends before has only a part."""
    want = prompt_logprobs_of(ask.prompt)
    assert ask.prompt_logprobs is not None and (len(token_ids) == len(want) or not whole), f"{ask.name}: a part"
    told = list(zip(token_ids, values, strict=True))
    assert told == [want[at] for at in sorted(want)][: len(told)], f"{ask.name}: its prompt"


def judge(world: "World", front: "SimFront", reader: "Reader") -> None:
    """Raises AssertionError at an ending that the request should not have had."""
    ask = world.asks[reader.ask.name]
    name = ask.name
    if isinstance(reader.error, InvalidRequest):
        _judge_refusal(world, front, reader, reader.error)
        return
    if isinstance(reader.error, EngineError):
        assert world.fatal_error is not None, f"{name} was told that the engine is gone: {reader.error}"
        return
    assert world.max_tokens is not None
    want, reason = right_answer(ask, world.max_tokens)
    if reader.ended is EndReason.ERROR:
        if reader.detail.startswith("numerical_error"):
            assert name in world.faults.spoiled, f"{name} is said to have bad logits"
        elif reader.detail == CONDEMNED:
            deaths = sum(at >= reader.last_token_at for at in front.scheduler_deaths)
            assert deaths >= MAX_SCHEDULER_DEATHS, f"{name} was condemned after {deaths} deaths of the scheduler"
        elif reader.detail.startswith("engine_fault"):
            lost = sum(at > reader.last_token_at - LATE_S for at in world.faults.losses.values())
            assert lost >= 3, f"{name} was condemned after {lost} losses"
        else:
            raise AssertionError(f"{name} ended with {reader.detail!r}")
        return
    assert reader.ended is reason, f"{name} ended with {reader.ended}, not {reason}"
    assert reader.tokens == want, f"{name} got {len(reader.tokens)} of {len(want)} tokens"
    assert reader.num_counted == len(want), f"{name} is said to have {reader.num_counted} tokens"
    if ask.poison is not None:
        assert ask.poison >= len(want), f"{name} killed nobody"


def _judge_refusal(world: "World", front: "SimFront", reader: "Reader", error: InvalidRequest) -> None:
    ask = world.asks[reader.ask.name]
    assert not reader.tokens, f"{ask.name} was refused after {len(reader.tokens)} tokens: {error.code}"
    if error.code == "queue_full":
        assert world.config.max_num_queued_reqs
        assert front.submitted[ask.name] == 1, f"{ask.name} was refused when it was submitted again"
        return
    assert error.code == "kv_pool_too_small", f"{ask.name} was refused: {error.code}"
    assert world.max_tokens is not None and len(ask.prompt) + 1 > world.max_tokens
