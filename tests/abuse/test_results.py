"""Well-formed but wrong results: the scheduler refuses each of them whole, and accepts the correct one afterwards.

The clients receive the same tokens as in an undisturbed run.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from scheduler_driver import VOCAB_SIZE, Driver, change, end_of, expected_tokens
from side_parts import with_rows
from tiers import thinned

from quire.protocol.wire.front_end_messages import EndReason
from quire.protocol.wire.side_rows import LOGPROBS, PROMPT_LOGPROBS, SideKind, SideRows
from quire.protocol.wire.worker_messages import ModelRunnerOutput
from quire.scheduler_proc.scheduler import WorkerFault

PROMPTS = {"a": list(range(3, 12)), "b": [7, 8, 9], "c": [1, 2, 3, 4, 5], "d": [4, 4]}
NUM_TOKENS = 9
Damage = Callable[[ModelRunnerOutput], ModelRunnerOutput]


def ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def running(asynchronous: bool = True) -> Driver:
    """Return a driver with four requests that have tokens. The first one has log probabilities; d has ended."""
    driver = Driver(async_scheduling=asynchronous)
    for name, prompt in PROMPTS.items():
        wanted = {"logprobs": 1} if name == "a" else {"prompt_logprobs": 1} if name == "b" else {}
        driver.add(name, prompt, max_tokens=2 if name == "d" else NUM_TOKENS, **wanted)
    for _ in range(4):
        driver.step()
    assert driver.answers["d"].ended is not None
    return driver


def with_logprobs(result: ModelRunnerOutput, **fields: Any) -> ModelRunnerOutput:
    """Add log probabilities of the first row, changed by ``fields``; ``ids``, ``ranks`` and ``values`` are arrays."""
    assert result.tokens is not None
    arrays = {"ids": ints(int(result.tokens[0]), 5), "ranks": ints(2), "values": floats(-1.5, -0.5)}
    return with_rows(result, LOGPROBS, changed_rows(LOGPROBS, arrays, (0, 0, 1), fields))  # type: ignore[no-any-return]


def with_prompts(result: ModelRunnerOutput, *parts: tuple[int, int, int], **fields: Any) -> ModelRunnerOutput:
    """Add prompt log probabilities of ``parts`` (handle, start, count), changed as in ``with_logprobs``."""
    arrays = {"ids": ints(8, 5, 9, 6), "ranks": ints(1, 1), "values": floats(-1, -2, -1, -2)}
    handles, starts, counts = (list(column) for column in zip(*(parts or ((1, 1, 2),)), strict=True))
    fields = {"handles": handles, "starts": starts, "counts": counts} | fields
    rows = changed_rows(PROMPT_LOGPROBS, arrays, (1, 1, 2), fields)
    return with_rows(result, PROMPT_LOGPROBS, rows)  # type: ignore[no-any-return]


def changed_rows(kind: SideKind, arrays: dict[str, Any], part: tuple[int, int, int], fields: dict[str, Any]) -> Any:
    ids, ranks, values = (fields.pop(name, array) for name, array in arrays.items())
    handle, start, count = part
    rows = SideRows(kind.number, [handle], [start], [count], [2], [ids, ranks], [values])
    return msgspec.structs.replace(rows, **fields)


def tokens_of(result: ModelRunnerOutput) -> Any:
    assert result.tokens is not None
    return result.tokens.copy()


def at(result: ModelRunnerOutput, index: int, token: int) -> ModelRunnerOutput:
    tokens = tokens_of(result)
    tokens[index] = token
    return change(result, tokens=tokens)


DAMAGE: dict[str, Damage] = {
    "a token past the vocabulary": lambda r: at(r, 0, VOCAB_SIZE),
    "a token far past the vocabulary": lambda r: at(r, -1, 2**31 - 1),
    "a negative token": lambda r: at(r, 1, -1),
    "the lowest token": lambda r: at(r, 1, -(2**31)),
    "a token short": lambda r: change(r, tokens=tokens_of(r)[:-1]),
    "a token too many": lambda r: change(r, tokens=np.append(tokens_of(r), np.int32(1))),
    "no tokens": lambda r: change(r, tokens=None),
    "tokens without handles": lambda r: change(r, handles=ints()),
    "an unknown handle": lambda r: change(r, handles=ints(0, 1, 77)),
    "a negative handle": lambda r: change(r, handles=ints(0, 1, -1)),
    "a handle twice": lambda r: change(r, handles=ints(0, 1, 1)),
    "a handle less": lambda r: change(r, handles=ints(0, 1), tokens=tokens_of(r)[:2]),
    "an ended request in addition": lambda r: change(r, handles=ints(0, 1, 2, 3), tokens=ints(1, 1, 1, 1)),
    "an ended request instead": lambda r: change(r, handles=ints(0, 1, 3)),
    "the step before": lambda r: change(r, step=r.step - 1),
    "the step after": lambda r: change(r, step=r.step + 1),
    "a step that was never sent": lambda r: change(r, step=2**40),
    "counts": lambda r: change(r, counts=ints(2, 1, 1), tokens=ints(1, 1, 1, 1)),
    "counts of nothing": lambda r: change(r, counts=ints(0, 1, 1), tokens=ints(1, 1)),
    "negative counts": lambda r: change(r, counts=ints(5, -1, -1), tokens=ints(1, 1, 1)),
    "counts that wrap around": lambda r: change(r, counts=ints(2**31 - 1, 2**31 - 1, 5)),
    "too few counts": lambda r: change(r, counts=ints(1, 2)),
    "no counts": lambda r: change(r, counts=ints()),
    "drafts that were not sent": lambda r: change(r, drafts=ints(1, 0, 0)),
    "negative drafts": lambda r: change(r, drafts=ints(-1, 0, 0)),
    "too few drafts": lambda r: change(r, drafts=ints(0)),
    "a bad row of an unknown handle": lambda r: change(r, bad=[77]),
    "a bad row of an ended request": lambda r: change(r, bad=[3]),
    "a failed row of an unknown handle": lambda r: change(r, failed=[(77, "why")]),
    "a time of NaN": lambda r: change(r, seconds=math.nan),
    "infinite time": lambda r: change(r, seconds=math.inf),
    "negative time": lambda r: change(r, seconds=-0.5),
    "a log probability of NaN": lambda r: with_logprobs(r, values=floats(math.nan, -0.5)),
    "another log probability of NaN": lambda r: with_logprobs(r, values=floats(-1.5, math.nan)),
    "an infinite log probability": lambda r: with_logprobs(r, values=floats(math.inf, -0.5)),
    "a log probability above 0": lambda r: with_logprobs(r, values=floats(0.5, -0.5)),
    "a rank of 0": lambda r: with_logprobs(r, ranks=ints(0)),
    "a negative rank": lambda r: with_logprobs(r, ranks=ints(-5)),
    "a rank past the vocabulary": lambda r: with_logprobs(r, ranks=ints(VOCAB_SIZE + 1)),
    "too many ranks": lambda r: with_logprobs(r, ranks=ints(1, 1)),
    "no ranks": lambda r: with_logprobs(r, ranks=ints()),
    "no values": lambda r: with_logprobs(r, values=floats()),
    "a value short": lambda r: with_logprobs(r, values=floats(-1.5)),
    "an id too many": lambda r: with_logprobs(r, ids=ints(1, 2, 3)),
    "no ids": lambda r: with_logprobs(r, ids=ints()),
    "an id past the vocabulary": lambda r: with_logprobs(r, ids=ints(1, VOCAB_SIZE)),
    "a negative id": lambda r: with_logprobs(r, ids=ints(-1, 1)),
    "a row past the end": lambda r: with_logprobs(r, starts=[1]),
    "a negative row": lambda r: with_logprobs(r, starts=[-1]),
    "a row without logprobs": lambda r: with_logprobs(r, handles=[1]),
    "log probabilities of an ended request": lambda r: with_logprobs(r, handles=[3]),
    "an unknown kind": lambda r: with_logprobs(r, kind=0),
    "a width of 0": lambda r: with_logprobs(r, widths=[0]),
    "a negative width": lambda r: with_logprobs(r, widths=[-2]),
    "a huge width": lambda r: with_logprobs(r, widths=[2**63]),
    "a width above the requested one": lambda r: with_logprobs(
        r, widths=[3], ids=ints(1, 2, 3), values=floats(-1, -1, -1)
    ),
    "a row more than tokens": lambda r: with_logprobs(
        r, counts=[2], ids=ints(1, 2, 1, 2), values=floats(-1, -1, -1, -1), ranks=ints(1, 1)
    ),
    "a part twice": lambda r: change(r, side=with_logprobs(r).side * 2),
    "a prompt without prompt_logprobs": lambda r: with_prompts(r, (0, 1, 2)),
    "a prompt of an unknown handle": lambda r: with_prompts(r, (77, 1, 2)),
    "beyond a prompt": lambda r: with_prompts(r, (1, 2, 2)),
    "before a prompt": lambda r: with_prompts(r, (1, 0, 2)),
    "a prompt counted negatively": lambda r: with_prompts(r, (1, 1, -2)),
    "a prompt twice": lambda r: with_prompts(r, (1, 1, 1), (1, 1, 1)),
    "a prompt's width": lambda r: with_prompts(r, widths=[0]),
    "a prompt without ranks": lambda r: with_prompts(r, ranks=ints()),
    "a prompt's id past the vocabulary": lambda r: with_prompts(r, ids=ints(8, 5, 9, VOCAB_SIZE)),
}


def go_on(driver: Driver) -> None:
    """Run to the end, and check that every client received the expected tokens."""
    driver.run()
    driver.check_drained()
    for name, prompt in PROMPTS.items():
        count = 2 if name == "d" else NUM_TOKENS
        assert end_of(driver, name) == (EndReason.LENGTH, expected_tokens(prompt, count)), name


def damaged(driver: Driver, damage: Damage) -> None:
    """Damage the next result and check that it is refused without any effect."""
    while driver.schedule() is not None:
        pass
    driver.execute()
    before = msgspec.structs.asdict(driver.scheduler.statistics())
    assert driver.deliver_damaged(damage)
    assert msgspec.structs.asdict(driver.scheduler.statistics()) == before


@pytest.mark.parametrize("asynchronous", [False, True])
def test_wrong_result_is_refused_and_the_correct_one_accepted(asynchronous: bool) -> None:
    driver = running(asynchronous)
    for damage in DAMAGE.values():
        damaged(driver, damage)
    driver.deliver()
    go_on(driver)


def test_duplicate_result() -> None:
    driver = running()
    while driver.schedule() is not None:
        pass
    driver.execute()
    taken = driver.deliver()
    assert taken is not None
    with pytest.raises(WorkerFault, match=f"result of step {taken.step}"):
        driver.scheduler.consume(taken)
    go_on(driver)


def test_unexpected_result() -> None:
    driver = Driver()
    with pytest.raises(WorkerFault, match="expected none"):
        driver.scheduler.consume(ModelRunnerOutput(1, ints(1), ints(0)))
    driver.scheduler.check()


@pytest.mark.parametrize("step", [-1, -(2**40)])
def test_result_before_the_first_step_is_ignored(step: int) -> None:
    """Ignored like a result of an earlier worker epoch."""
    driver = running()
    stray = driver.scheduler.statistics().num_stray_messages
    driver.scheduler.consume(ModelRunnerOutput(step, ints(1), ints(0)))
    assert driver.scheduler.statistics().num_stray_messages == stray + 1
    go_on(driver)


def test_non_finite_row_fails_only_its_request() -> None:
    driver = running(asynchronous=False)
    driver.schedule()
    driver.execute()
    received = driver.down.receive()
    assert received is not None
    result = change(with_logprobs(received.message, values=floats(math.nan, math.nan)), bad=[0])
    driver.scheduler.consume(result)
    driver._collect()
    driver.run()
    assert driver.answers["a"].reason is EndReason.ERROR
    for name in ("b", "c"):
        assert end_of(driver, name) == (EndReason.LENGTH, expected_tokens(PROMPTS[name], NUM_TOKENS))


NUMBERS = [-(2**31), -1, 0, 1, 2, 3, 77, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1]


def _mutate(result: ModelRunnerOutput, rng: random.Random) -> ModelRunnerOutput:
    """Return the result with one field changed."""

    def array(old: Any) -> Any:
        kind = np.float32 if old is not None and old.dtype == np.float32 else np.int32
        numbers = [math.nan, math.inf, -math.inf, 1.0, -1.0] if kind is np.float32 else NUMBERS
        values = [] if old is None else old.tolist()
        match rng.randrange(4):
            case 0 if values:
                values[rng.randrange(len(values))] = rng.choice(numbers)
            case 1 if values:
                del values[rng.randrange(len(values))]
            case 2:
                values.append(rng.choice(numbers))
            case _:
                return None
        return np.array(values, kind)

    def side(old: list[SideRows]) -> list[SideRows]:
        """Return the parts with one field of one of them changed."""
        if not old or rng.random() < 0.1:
            return [*old, SideRows(rng.choice(NUMBERS), [0], [0], [1], [1])]
        at = rng.randrange(len(old))
        field = rng.choice(SideRows.__struct_fields__)
        value: Any = getattr(old[at], field)
        if field == "kind":
            value = rng.choice(NUMBERS)
        elif field in ("ints", "floats"):
            value = [each for each in map(array, value) if each is not None]
        else:
            value = rng.choices(NUMBERS, k=rng.choice([1, 2]))
        return [*old[:at], msgspec.structs.replace(old[at], **{field: value}), *old[at + 1 :]]

    name = rng.choice(result.__struct_fields__)
    old = getattr(result, name)
    match name:
        case "step":
            return change(result, step=rng.choice([old - 1, old + 1, *NUMBERS]))
        case "bad":
            return change(result, bad=rng.choices(NUMBERS, k=2))
        case "failed":
            return change(result, failed=[(rng.choice(NUMBERS), "why")])
        case "seconds":
            return change(result, seconds=rng.choice([math.nan, -1.0, math.inf, 0.5]))
        case "side":
            return change(result, side=side(old))
        case "failure":
            return result
    return change(result, **{name: array(old)})


@pytest.mark.parametrize("seed", thinned(range(4), keep=1))
def test_random_damage_is_refused_or_valid(seed: int) -> None:
    rng = random.Random(seed)
    driver, num_refused, num_taken = running(), 0, 0
    while num_refused < 150:
        while driver.schedule() is not None:
            pass
        driver.execute()
        received = driver.down.receive()
        assert received is not None
        result = with_prompts(with_logprobs(received.message)) if rng.random() < 0.5 else received.message
        try:
            for _ in range(rng.randint(1, 2)):
                result = _mutate(result, rng)
            driver.scheduler.consume(result)
        except WorkerFault as fault:
            assert "\n" not in str(fault)
            driver.scheduler.check()
            driver._held_back.appendleft(received)
            driver.deliver()
            num_refused += 1
            if all(driver.answers[name].ended is not None for name in PROMPTS):
                go_on(driver)
                driver = running()
        else:
            driver.scheduler.check()
            driver, num_taken = running(), num_taken + 1
    assert num_taken
