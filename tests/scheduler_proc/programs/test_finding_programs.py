"""Which requests are turns of one program, when no client names its job; and jobs that clients name."""

import random
from collections.abc import Sequence
from itertools import count

import pytest
from fake_adapters import adapter_ref
from scheduler_driver import Driver

from quire.protocol.wire.front_end_messages import EndReason
from quire.scheduler_proc.features.programs.match import COMPACTED_TOKENS, MAX_OWNERS, NEAR_TOKENS, Matcher
from quire.scheduler_proc.features.programs.program_state import PROGRAM, ProgramState

BLOCK = 4
SYSTEM = list(range(100, 140))
"""A system prompt of whole blocks."""


class Agents:
    """A driver whose requests are sent by conversations."""

    def __init__(self, **settings: object) -> None:
        self.driver = Driver(
            num_blocks=400,
            **{"scheduling_policy": "program", "max_model_len": 1024, "max_num_batched_tokens": 1024} | settings,
        )
        self._rng = random.Random(5)
        self._numbers = count()

    def words(self, num_tokens: int = 40) -> list[int]:
        """Return tokens that no other call returns."""
        return [self._rng.randrange(200, 1000) for _ in range(num_tokens)]

    def start(self, prompt: Sequence[int], max_tokens: int = 12, **fields: object) -> tuple[str, ProgramState | None]:
        """Send a request. Return its id and its program."""
        name = f"r{next(self._numbers)}"
        self.driver.add(name, list(prompt), max_tokens=max_tokens, ignore_eos=True, **fields)
        assert self.driver.answers[name].rejected is None, self.driver.answers[name].rejected
        return name, PROGRAM.of(self.driver.request(name))

    def end(self, name: str) -> list[int]:
        """Return the answer of a request."""
        return self.driver.run()[name].tokens

    def turn(self, prompt: Sequence[int], **fields: object) -> tuple[ProgramState | None, list[int]]:
        """Send a request. Return its program, and the context at the end: prompt and answer."""
        name, program = self.start(prompt, **fields)
        return program, [*prompt, *self.end(name)]

    def found(self) -> dict[str, int]:
        programs = self.driver.control("statistics").programs
        assert programs is not None
        return {how: number for how, number in programs.turns.items() if number}

    def finish(self) -> None:
        self.driver.finish()
        assert self.driver.replay_lines() is None


def test_a_last_step_that_is_refused_does_not_end_its_job() -> None:
    driver = Driver(scheduling_policy="program")
    driver.add("last", [1, 2, 3, 4, 5], job_id="run", is_last_step=True)
    driver.hold("last")
    driver.refuse("last")
    driver.add("again", [1, 2, 3, 4, 5], job_id="run", is_last_step=True, max_tokens=2)
    driver.finish()
    assert driver.answers["last"].rejected is not None
    assert driver.answers["again"].reason is EndReason.LENGTH


def test_a_turn_that_continues_the_context_belongs_to_its_program() -> None:
    agents = Agents()
    first, context = agents.turn(SYSTEM + agents.words())
    for _ in range(2):
        program, context = agents.turn(context + agents.words(9))
        assert program is first
    assert agents.found() == {"new": 1, "prefix": 2}
    agents.finish()


def test_a_common_system_prompt_does_not_make_two_conversations_one_program() -> None:
    agents = Agents()
    seen = set()
    for _ in range(3):
        program, context = agents.turn(SYSTEM + agents.words(80))
        assert program is not None and program not in seen
        seen.add(program)
        again, _ = agents.turn(context + agents.words())
        assert again is program
    agents.finish()


def test_an_answer_that_the_client_wrote_otherwise_may_differ() -> None:
    """Templates drop thoughts, and clients parse calls and write them again."""
    agents = Agents()
    prompt = SYSTEM + agents.words(80)
    first, _ = agents.turn(prompt)
    again, _ = agents.turn(prompt + agents.words(30))
    assert again is first
    agents.finish()


def test_the_end_of_a_first_prompt_may_be_dropped_but_not_its_text() -> None:
    agents = Agents()
    prompt = SYSTEM + agents.words(120)
    first, _ = agents.turn(prompt + agents.words(8))
    again, _ = agents.turn(prompt + agents.words(40))
    other, _ = agents.turn(SYSTEM + agents.words(200))
    assert again is first is not other
    agents.finish()


def test_the_last_message_may_be_edited() -> None:
    agents = Agents()
    first, context = agents.turn(SYSTEM + agents.words())
    _, context = agents.turn(context + agents.words())
    for _ in range(2):
        again, _ = agents.turn(context + agents.words())
        assert again is first
    agents.finish()


def test_a_warm_up_of_the_system_prompt_takes_one_conversation_at_most() -> None:
    turns = Turns()
    warm_up = turns.begin("s" * 30)
    assert turns.find("s" * 30 + "a" * 9) is warm_up
    turns.add(warm_up, "s" * 30 + "a" * 9)
    assert turns.find("s" * 30 + "b" * 20) is None
    assert turns.find("s" * 30 + "a" * 9 + "c" * 9) is warm_up


def test_samples_of_one_prompt_are_separated_by_their_answers() -> None:
    agents = Agents()
    prompt = SYSTEM + agents.words()
    (one, first), (two, second) = agents.start(prompt, seed=1), agents.start(prompt, max_tokens=20)
    assert first is not second
    contexts = [prompt + agents.end(one), prompt + agents.end(two)]
    # The fake model samples greedily: what the client sends back makes the contexts differ.
    third, _ = agents.turn(contexts[1] + agents.words())
    assert third is second
    agents.finish()


def test_a_conversation_of_another_tenant_is_another_program() -> None:
    agents = Agents()
    first, context = agents.turn(SYSTEM + agents.words(), tenant=1)
    other, _ = agents.turn(context + agents.words(), tenant=2)
    assert other is not first
    same, _ = agents.turn(context + agents.words(), tenant=1)
    assert same is first
    agents.finish()


def test_a_request_beside_a_running_one_joins_its_program_only_behind_the_first_prompt() -> None:
    agents = Agents()
    prompt = SYSTEM + agents.words()
    first, context = agents.turn(prompt)
    name, running = agents.start(context + agents.words(), max_tokens=40)
    _, beside = agents.start(context + agents.words())
    assert first is running is beside
    _, other = agents.start(SYSTEM + agents.words())
    assert other is not first
    agents.end(name)
    agents.finish()


def test_without_prefix_caching_only_a_hint_makes_a_program() -> None:
    agents = Agents(enable_prefix_caching=False)
    none, context = agents.turn(SYSTEM + agents.words())
    assert none is None
    named, _ = agents.turn(context, job_id="mine")
    assert named is not None and named.job_id == "mine"
    assert agents.found() == {"none": 1, "job_id": 1}
    agents.finish()


def test_policies_without_programs_remember_nothing() -> None:
    agents = Agents(scheduling_policy="fcfs")
    assert agents.turn(SYSTEM, job_id="mine")[0] is None
    assert agents.driver.control("statistics").programs is None


def test_a_job_that_a_later_turn_names_keeps_its_program() -> None:
    """The first response of a chain of responses has no id when it is requested."""
    agents = Agents()
    first, context = agents.turn(SYSTEM + agents.words())
    named, context = agents.turn(context + agents.words(), job_id="resp_1", hint="response")
    again, _ = agents.turn(agents.words(), job_id="resp_1", hint="response")
    assert first is named is again
    assert agents.found() == {"new": 1, "response": 2}
    assert agents.turn(context + agents.words())[0] is not first, "its later turns name it"
    nameless, _ = agents.turn(SYSTEM)
    other, _ = agents.turn(SYSTEM, job_id="resp_2", hint="response")
    assert other is not nameless, "the same prompt is not its next turn"
    agents.finish()


def test_a_refused_turn_of_a_job_that_has_ended_leaves_no_adapter() -> None:
    agents = Agents(enable_lora=True, max_loras=1, max_cpu_loras=2)
    agents.turn(SYSTEM, job_id="mine", is_last_step=True)
    agents.driver.add("late", SYSTEM, job_id="mine", adapter=adapter_ref("unused"))
    assert agents.driver.answers["late"].rejected is not None
    agents.driver.scheduler.check()


def test_no_request_follows_the_last_step_but_one_that_was_accepted_before() -> None:
    agents = Agents()
    program, context = agents.turn(SYSTEM, job_id="mine", is_last_step=True)
    agents.driver.add("late", context, job_id="mine")
    refused = agents.driver.answers["late"].rejected
    assert refused is not None and (refused.code, refused.param) == ("job_ended", "job_id")
    again, _ = agents.turn(context, job_id="mine", resubmitted=True, is_last_step=True)
    assert again is program
    agents.driver.add("nameless", context, is_last_step=True)
    refused = agents.driver.answers["nameless"].rejected
    assert refused is not None and refused.param == "is_last_step"
    agents.finish()


def test_forks_belong_to_the_program_of_their_parent() -> None:
    agents = Agents()
    name, program = agents.start(SYSTEM + agents.words(), max_tokens=40)
    _, fork = agents.start([], forked_from=name)
    assert fork is program is not None
    agents.end(name)
    agents.finish()


@pytest.mark.parametrize("named", ["mine", ""])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_fork_that_names_another_job_ends_that_and_not_its_parents(named: str, is_known: bool) -> None:
    agents = Agents()
    agents.start(agents.words(), job_id="run" if is_known else "")
    parent, program = agents.start(agents.words(), job_id=named)
    _, other = agents.start([], forked_from=parent, num_forked_tokens=40, job_id="run", is_last_step=True)
    assert program is not None is not other
    assert (program.job_id, program.has_ended, other.job_id, other.has_ended) == (named, False, "run", True)
    agents.finish()


class Turns:
    """A Matcher, and prompts whose blocks are known by texts."""

    def __init__(self) -> None:
        self.matcher = Matcher(BLOCK)
        self._numbers = count(1)

    def find(self, path: str, **fields: bool) -> ProgramState | None:
        return self.matcher.find(0, _hashes(path), BLOCK * len(path), **fields)

    def begin(self, path: str, num_turns: int = 1) -> ProgramState:
        """Return a new program with this prompt, which has ended."""
        program = ProgramState(next(self._numbers), 0, "", 0.0)
        self.add(program, path)
        program.num_turns = num_turns
        return program

    def add(self, program: ProgramState, path: str) -> None:
        self.matcher.arrived(program, _hashes(path), BLOCK * len(path))
        self.matcher.ended(program, _hashes(path))
        self.matcher.check()


def _hashes(path: str) -> list[bytes]:
    """Return the chained hashes of blocks, one per character."""
    return [path[: at + 1].encode() for at in range(len(path))]


NEAR = NEAR_TOKENS // BLOCK
MANY = COMPACTED_TOKENS // BLOCK


def test_prompts_that_differ_at_the_end_are_one_program_only_if_the_later_one_is_longer() -> None:
    turns = Turns()
    first = turns.begin("s" * 40 + "a" * NEAR)
    assert turns.find("s" * 40 + "b" * NEAR) is None
    assert turns.find("s" * 40 + "b" * (NEAR + 1)) is first
    assert turns.find("s" * 39 + "b" * (NEAR + 9)) is None
    first.live[1] = first  # type: ignore[assignment]
    assert turns.find("s" * 40 + "b" * (NEAR + 1)) is None, "while a turn of it is running"


@pytest.mark.parametrize(
    ("prompt", "is_found"),
    [
        ("s" * MANY + "b" * (60 + 2 * MANY), True),
        ("s" * MANY + "b" * (59 + 2 * MANY), False),
        ("s" * (MANY - 1) + "b" * (99 + 2 * MANY), False),
    ],
)
def test_a_summary_is_recognized_by_its_beginning_and_its_length(prompt: str, is_found: bool) -> None:
    turns = Turns()
    first = turns.begin("s" * MANY + "a" * 60, num_turns=2)
    assert turns.find(prompt) is (first if is_found else None)
    assert turns.find(prompt, contains_first=True) is None
    first.num_turns = 1
    assert turns.find(prompt) is None
    first.num_turns = 2
    other = turns.begin("s" * MANY + "c" * 60)
    assert turns.find(prompt) is None, "the beginning is that of two programs"
    turns.matcher.forget(other)
    assert turns.find(prompt) is (first if is_found else None)


def test_of_two_programs_with_the_same_past_the_one_that_ends_there_continues() -> None:
    turns = Turns()
    one, two = turns.begin("s" * 30), turns.begin("s" * 30)
    assert turns.find("s" * 30 + "a" * 9) is None
    turns.add(one, "s" * 30 + "a" * 9)
    assert turns.find("s" * 30 + "b" * 9) is two
    assert turns.find("s" * 30 + "a" * 9 + "c" * 9) is one
    turns.add(two, "s" * 30 + "a" * 9)
    turns.add(one, "s" * 30 + "a" * 9 + "c" * 9)
    assert turns.find("s" * 30 + "a" * 9 + "d") is two


def test_a_prefix_of_many_programs_identifies_none_even_when_most_are_forgotten() -> None:
    turns = Turns()
    programs = [turns.begin("s" * 30) for _ in range(MAX_OWNERS + 1)]
    for program in programs[1:]:
        turns.matcher.forget(program)
    assert turns.find("s" * 30 + "a" * 9) is None
    turns.begin("s" * 20)
    assert turns.find("s" * 30 + "a" * 9) is None, "its first prompt is shorter than the common prefix"
    turns.add(programs[0], "s" * 30 + "a" * 9)
    assert turns.find("s" * 30 + "a" * 9 + "b") is programs[0]
