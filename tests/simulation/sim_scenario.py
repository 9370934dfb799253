"""Requests and faults of one simulation, drawn from a seed: plain data, which can be reduced and printed."""

import random
from dataclasses import dataclass, replace
from typing import Any

from fake_items import image
from sim_settings import (
    EOS,
    MAX_IMAGE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    adapter_settings,
    encoder_settings,
    item_settings,
    layout_settings,
    pooling_settings,
    program_settings,
    random_settings,
    state_settings,
    table_settings,
)

from quire.protocol.request.pooling_params import POOLING_TASKS
from quire.protocol.wire.item_messages import InputItem

FRAME_DAMAGE = ("drop", "double", "delay", "reorder", "truncate", "flip", "replay")
DIRECTIONS = ("to_worker", "from_worker", "to_front", "from_front")
WORKER_FAULTS = ("die_now", "die_in_prefill", "die_in_decode", "die_all", "die_at_start", "hang", "freeze", "slow")
WRONG_RESULTS = ("oom", "wrong", "twice", "nan", "disagree", "fault")
OTHERS = ("scheduler_dies", "scheduler_dies_twice", "front_dies", "not_reading", "clock_jump", "pause")
RARE = ("poison", "bug", "trace_full", "reset", "new content", "unload", "held")
"""Faults of some runs only."""
KINDS = (
    *(f"{direction} {damage}" for direction in DIRECTIONS for damage in FRAME_DAMAGE),
    *WORKER_FAULTS,
    *WRONG_RESULTS,
    *OTHERS,
    *RARE,
)
"""Every kind of fault, as counted. ``poison`` is counted each time that the request ends a worker, ``bug`` each time
that the request ends the scheduler. ``held``: an operator pauses the engine for a while."""
DEADLY = frozenset(
    {*WORKER_FAULTS, *WRONG_RESULTS, "scheduler_dies", "scheduler_dies_twice", "poison", "bug"}
    | {f"{direction} {damage}" for direction in ("to_worker", "from_worker") for damage in FRAME_DAMAGE}
) - {"slow", "nan", "oom"}
"""Faults that may end the workers or the scheduler; five of them with no token in between end the engine."""


REAL_RUNNER_SHARE = 0.33
"""Fraction of seeds with the real runner, which makes a step four times as slow."""
BUG_SHARE = 0.3
TRACE_SHARE = 0.15
TENANT_SHARE = 0.25
"""Fraction of seeds with three tenants."""
FORK_SHARE = 0.6
"""Fraction of seeds with forks, of those with room for two requests in a step."""
DISK_SHARE = 0.5
"""Fraction of seeds with a disk, of those with a prefix cache."""
ADAPTER_SEEDS = (5, 7)
"""Seeds modulo 9 with LoRA adapters; none of them is a seed of a mutation."""
PROGRAM_SEEDS = (8, 11)
"""Seeds modulo 13 with a policy that needs programs; none of them is a seed of a mutation."""
POOLING_SEEDS = (0, 8)
"""Seeds modulo 13 in which requests are pooled, or ask for routed experts; none of them is a seed of a mutation."""
ENCODER_SEEDS = (13, 60)
"""Seeds modulo 78 of these whose model keeps no KV, and only pools."""
BEAM_SEEDS = (4, 9)
"""Seeds modulo 12 with beam searches; none of them is a seed of a mutation."""
ITEM_SEEDS = (10, 12)
"""Seeds modulo 16 whose model reads images; none of them is a seed of a mutation."""
STATE_SEEDS = (5,)
"""Seeds modulo 11 whose model has recurrent states."""
LAYOUT_SEEDS = (4, 10)
"""Seeds modulo 14 with the KV layout of a known model."""
TABLE_SEEDS = (9,)
"""Seeds modulo 17 that take the combinations of ``sim_cells.py`` in turn; none of them is a seed of a mutation."""
HELD_SHARE = 0.2
"""Fraction of seeds in which an operator pauses the engine."""
NUM_ADAPTERS = 5
NUM_JOBS = 4
PAGE_BYTES = 4096
BEGIN_S = 2.5
"""Faults start after the engine was ready once, because a failed first start ends it by design."""


SWITCHES = ("disk", "adapters", "pooling", "encoder", "beams", "states", "items")
"""Fields of a Scenario that are true or false."""


@dataclass(frozen=True)
class Fault:
    """``at``: seconds from the beginning. ``where``: index of a rank or a front end, modulo their number."""

    at: float
    kind: str
    where: int = 0


@dataclass(frozen=True)
class SimRequest:
    """One request, and the behaviour of its client.

    Attributes:
        prefix: number of a shared prefix, and how many of its tokens the prompt has.
        own: seed of the tokens after the prefix, and their number.
        then: abort or stop (after this many tokens), leave_at (abort after this many tenths of a second), or empty.
        poison: index of the output token at which it ends its worker; -1: in any step; None: never.
        even: a grammar allows only even tokens.
        logprobs: number of most likely tokens with log probabilities, in addition to the sampled one.
        bug: number of output tokens from which it makes the scheduler fail; None: never.
        fork: name of the request from which it is forked, and number of that request's output tokens from which it
            continues, or less if that is all; ("", 0) for none. It arrives when its parent has got this number of
            tokens, or at the end of its parent. The prompts are equal.
        adapter: number of its LoRA adapter; -1: none. Its content is that of the folder when the name is first used.
        session: name of the session of which it is a piece, or "". It arrives when the piece before it is over.
        so_far: the session's tokens when it arrives, which come before its own.
        task: what its prompt is turned into, or "" if it generates.
        experts: it asks for routed experts.
        beams: width of its beam search; 0: it is none.
        job: name of the job of which it is a step, or "". is_last_step: no other step of it may follow.
        tool: what its answer calls, or "".
        min_tokens, stops, repetition: other conditions of its end; ``stops``: it has stop tokens of its own.
    """

    at: float
    name: str
    front: int
    prefix: tuple[int, int]
    own: tuple[int, int]
    max_tokens: int
    ignore_eos: bool = True
    priority: int = 0
    salt: str = ""
    then: tuple[str, int] = ("", 0)
    poison: int | None = None
    prompt_logprobs: int | None = None
    even: bool = False
    logprobs: int | None = None
    bug: int | None = None
    tenant: int = 0
    fork: tuple[str, int] = ("", 0)
    adapter: int = -1
    session: str = ""
    so_far: tuple[int, ...] = ()
    task: str = ""
    experts: bool = False
    beams: int = 0
    job: str = ""
    is_last_step: bool = False
    tool: str = ""
    min_tokens: int = 0
    stops: bool = False
    repetition: bool = False

    @property
    def dimensions(self) -> int:
        """Return the number of values of each pooled row; 0: all."""
        return 0 if self.task == "classify" else (0, 0, 3, 6)[self.own[0] % 4]

    @property
    def stop_token_ids(self) -> list[int]:
        return random.Random(f"stops {self.own[0]}").sample(range(VOCAB_SIZE), 30) if self.stops else []

    @property
    def prompt(self) -> list[int]:
        return [*self.so_far, *self.own_tokens] or [1]

    @property
    def images(self) -> list[InputItem]:
        """The images of its prompt, if the model reads any. A shared prefix has one of two sets."""
        found: list[InputItem] = []
        if self.session:
            return found
        parts = (
            (0, self.prefix[1], 2 * self.prefix[0] + self.own[0] % 2),
            (self.prefix[1], len(self.prompt), self.own[0]),
        )
        for begin, end, seed in parts:
            rng = random.Random(seed)
            at = begin + rng.choice((0, 0, 3))
            while at + (size := rng.choice((1, 2, MAX_IMAGE))) <= end and rng.random() < 0.8:
                found.append(image(f"{rng.randrange(5)} {size}", (at, size)))
                at += size + rng.choice((0, 1, 6))
        return found

    @property
    def own_tokens(self) -> list[int]:
        shared = random.Random(f"prefix {self.prefix[0]}")
        rest = random.Random(f"own {self.own[0]}")
        tokens = [shared.randrange(VOCAB_SIZE) for _ in range(self.prefix[1])]
        tokens += [rest.randrange(VOCAB_SIZE) for _ in range(self.own[1])]
        return tokens


@dataclass(frozen=True)
class Scenario:
    """``seed``: seed of the settings, and of all chance during the run. ``disk``: the prefix cache has a disk.
    ``adapters``: requests have LoRA adapters. ``pooling``: the model pools. ``encoder``: it does nothing else.
    ``beams``: some requests are beam searches. ``states``: the model has recurrent states. ``items``: it reads images.
    """

    seed: int
    requests: tuple[SimRequest, ...]
    faults: tuple[Fault, ...]
    disk: bool = False
    adapters: bool = False
    pooling: bool = False
    encoder: bool = False
    beams: bool = False
    states: bool = False
    items: bool = False

    @property
    def has_forks(self) -> bool:
        return any(request.fork[0] for request in self.requests)

    def paste(self) -> str:
        """Return the source text of this scenario, for a test."""
        lines = [f"Scenario(\n    {self.seed},\n    ("]
        lines += [f"        {request!r}," for request in self.requests]
        lines += ["    ),\n    ("]
        lines += [f"        {fault!r}," for fault in self.faults]
        return "\n".join([*lines, "    ),", *(f"    {name}=True," for name in SWITCHES if getattr(self, name)), ")"])


@dataclass(frozen=True)
class Shape:
    """Number and speed of the processes, and the scheduler's settings.

    ``real_runner``: workers run the real rows, tables and sampler beside the fake model.
    """

    num_ranks: int
    num_fronts: int
    standby: bool
    step_s: float
    start_s: float
    settings: dict[str, Any]
    real_runner: bool


def shape_of(
    seed: int,
    *,
    disk: bool = False,
    forks: bool = False,
    adapters: bool = False,
    pooling: bool = False,
    encoder: bool = False,
    beams: bool = False,
    states: bool = False,
    items: bool = False,
) -> Shape:
    rng = random.Random(f"shape {seed}")
    settings = random_settings(rng)
    num_host_pages = settings.pop("num_host_pages")
    settings["max_num_queued_reqs"] = rng.choice((0, 0, 0, 8))
    settings["num_blocks"] = max(settings["num_blocks"], 10)
    settings["trace"] = "trace.jsonl" if random.Random(f"trace {seed}").random() < TRACE_SHARE else ""
    settings["num_tenants"] = 3 if random.Random(f"tenants {seed}").random() < TENANT_SHARE else 0
    num_ranks = rng.choice((1, 1, 2))
    is_plain = not (adapters or pooling or beams or states or items)
    return Shape(
        num_ranks=num_ranks,
        num_fronts=rng.choice((1, 2, 3)),
        standby=rng.random() < 0.5,
        step_s=rng.choice((0.02, 0.05, 0.1)),
        start_s=rng.choice((0.05, 0.2, 0.6)),
        settings={
            **settings,
            "tensor_parallel_size": num_ranks,
            "cpu_offload_bytes": num_host_pages * num_ranks * PAGE_BYTES if settings["enable_prefix_caching"] else 0,
            **(layout_settings(random.Random(f"layout {seed}")) if seed % 14 in LAYOUT_SEEDS else {}),
            **(_disk_settings(seed, num_ranks) if disk else {}),
            **(_fork_settings(seed, settings) if forks else {}),
            **(adapter_settings(random.Random(f"adapters {seed}")) if adapters else {}),
            **(item_settings(random.Random(f"items {seed}"), settings) if items else {}),
            **(program_settings(random.Random(f"programs {seed}")) if _has_programs(seed) else {}),
            **(pooling_settings(random.Random(f"pooling {seed}")) if pooling else {}),
            **(_encoder_settings(seed) if encoder else {}),
            **(_state_settings(seed, num_ranks, has_tiers=settings["enable_prefix_caching"]) if states else {}),
            **(table_settings(random.Random(f"table {seed}"), seed // 17) if is_of_table(seed) else {}),
        },
        real_runner=is_plain and random.Random(f"runner {seed}").random() < REAL_RUNNER_SHARE,
    )


def is_of_table(seed: int) -> bool:
    """Whether a seed has a combination of ``sim_cells.py``, and nothing that would take the place of a part of it."""
    return seed % 17 in TABLE_SEEDS


def _has_programs(seed: int) -> bool:
    return seed % 13 in PROGRAM_SEEDS and not is_of_table(seed)


def _disk_settings(seed: int, num_ranks: int) -> dict[str, Any]:
    """Return settings with few blocks and a disk, also behind host memory."""
    rng = random.Random(f"disk {seed}")
    page = num_ranks * PAGE_BYTES
    return {
        "num_blocks": rng.choice((10, 14)),
        "ssd_cache_dir": "disk",
        "ssd_cache_bytes": rng.choice((12, 80, 300)) * page,
        "cpu_offload_bytes": rng.choice((0, 4, 12)) * page,
    }


def _state_settings(seed: int, num_ranks: int, *, has_tiers: bool) -> dict[str, Any]:
    """Return settings of a model with states, in most cases with host memory for them."""
    rng = random.Random(f"states {seed}")
    settings = state_settings(rng)
    return {**settings, "cpu_offload_bytes": has_tiers * rng.choice((0, 60, 60)) * num_ranks * PAGE_BYTES}


def _encoder_settings(seed: int) -> dict[str, Any]:
    settings = encoder_settings(random.Random(f"encoder {seed}"))
    del settings["num_host_pages"]
    return {**settings, "cpu_offload_bytes": 0}


def _fork_settings(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a larger pool in most cases, in which children and their parents run at once."""
    return {"num_blocks": max(settings["num_blocks"], random.Random(f"pool of forks {seed}").choice((10, 40, 80)))}


def scenario_of(seed: int, num_faults: int = 40) -> Scenario:
    """Draw a scenario: faults, and requests that arrive as long as faults do, about one each half second."""
    rng = random.Random(f"scenario {seed}")
    later = random.Random(f"later {seed}")  # for later additions, so that known seeds draw the same as before
    shape = shape_of(seed)
    drafts = bool(shape.settings["num_speculative_tokens"])
    pace = rng.choice((0.2, 0.4, 0.8))
    faults, at = [], BEGIN_S
    gentle = rng.random() < 0.15
    kinds = [kind for kind in KINDS if kind not in RARE and not (gentle and kind in DEADLY)]
    favourite = rng.choice(kinds)
    for _ in range(num_faults):
        at += rng.expovariate(1 / pace)
        kind = favourite if rng.random() < 0.15 else rng.choice(kinds)
        faults.append(Fault(round(at, 3), kind, rng.randrange(6)))
    requests, arrival, num_poison = [], rng.choice((0.0, BEGIN_S)), 0
    while arrival < at and len(requests) < 60:
        poison = None
        if not gentle and num_poison < 2 and rng.random() < 0.02:
            poison, num_poison = rng.choice((-1, 0, 2, 5)), num_poison + 1
        request = _draw_request(rng, len(requests), arrival, poison, later if drafts else rng)
        requests.append(replace(request, logprobs=later.choice((None, None, None, 0, 1, 2))))
        arrival += rng.expovariate(1 / (pace * rng.choice((0.2, 1.0, 2.0))))
    if requests and not gentle and later.random() < BUG_SHARE:
        which = later.randrange(len(requests))
        requests[which] = replace(requests[which], bug=later.choice((0, 0, 1, 3)))
    if shape.settings["num_tenants"]:
        of_tenants = random.Random(f"tenant of requests {seed}")
        requests = [replace(request, tenant=of_tenants.choice((0, 0, 0, 1, 2))) for request in requests]
    if shape.settings["trace"]:
        faults.append(Fault(round(later.uniform(BEGIN_S, at), 3), "trace_full"))
    of_disk = random.Random(f"requests beside a disk {seed}")
    disk = shape.settings["enable_prefix_caching"] and of_disk.random() < DISK_SHARE
    if disk:  # more requests have prefixes that others have left
        lengths = (0, 8, 16, 24, 24)
        requests = [replace(r, prefix=(of_disk.randrange(4), of_disk.choice(lengths))) for r in requests]
        faults += [Fault(round(of_disk.uniform(BEGIN_S, at), 3), "reset", of_disk.randrange(6))]
    of_forks = random.Random(f"forks {seed}")
    table = is_of_table(seed)
    if table or of_forks.random() < FORK_SHARE * (shape.settings["max_num_seqs"] > 1):
        requests = _with_forks(of_forks, requests)
    if table:
        deaths = random.Random(f"deaths {seed}")
        faults += [Fault(round(deaths.uniform(BEGIN_S, at), 3), "die_in_decode", deaths.randrange(6)) for _ in "123"]
    pooling, encoder = seed % 13 in POOLING_SEEDS and not table, seed % 78 in ENCODER_SEEDS and not table
    if pooling:
        requests = _with_pooling(random.Random(f"pooled requests {seed}"), requests, encoder=encoder)
        disk = disk and not encoder
    adapters = seed % 9 in ADAPTER_SEEDS and not table
    if adapters:
        of_adapters = random.Random(f"requests with adapters {seed}")
        chosen = (-1, 0, 0, 0, 1, *range(NUM_ADAPTERS))
        requests = [replace(each, adapter=of_adapters.choice(chosen)) for each in requests]
        kinds = ["new content"] * 3 + ["unload"] * 6
        faults += [Fault(round(of_adapters.uniform(0, at), 3), kind, of_adapters.randrange(30)) for kind in kinds]
    if shape.settings["scheduling_policy"] in ("program", "continuum"):
        requests = _with_jobs(random.Random(f"jobs {seed}"), requests)
    beams = seed % 12 in BEAM_SEEDS and not encoder and not table
    requests = _with_conditions(random.Random(f"conditions {seed}"), requests, shape, beams=beams)
    held = random.Random(f"held {seed}")
    if held.random() < HELD_SHARE:
        faults.append(Fault(round(held.uniform(BEGIN_S, at), 3), "held", held.randrange(6)))
    states = bool(shape.settings["layout"].states) if table else seed % 11 in STATE_SEEDS and not encoder
    items = seed % 16 in ITEM_SEEDS and not (encoder or states or table)
    return Scenario(seed, tuple(requests), tuple(faults), disk, adapters, pooling, encoder, beams, states, items)


def _with_jobs(rng: random.Random, requests: list[SimRequest]) -> list[SimRequest]:
    """Return requests of which most are steps of a few jobs. Some jobs end, and are followed by others."""
    made, num_jobs = [], NUM_JOBS
    for request in requests:
        is_last_step = rng.random() < 0.1
        num_jobs += is_last_step
        job = f"job {num_jobs - rng.randrange(NUM_JOBS)}" if rng.random() < 0.7 else ""
        tool = rng.choice(("grep", "make", ""))
        made.append(replace(request, job=job, is_last_step=bool(job) and is_last_step, tool=tool))
    return made


def _with_conditions(rng: random.Random, requests: list[SimRequest], shape: Shape, *, beams: bool) -> list[SimRequest]:
    """Return requests of which some have more conditions of their end, or are beam searches.

    The real sampler excludes stop tokens before ``min_tokens``, which the fake model does not.
    """
    parents = {request.fork[0] for request in requests}
    made = []
    for request in requests:
        is_alone = not (request.fork[0] or request.name in parents or request.task)
        if is_alone and not request.even:
            min_tokens = 0 if shape.real_runner else min(rng.choice((0, 0, 0, 5)), request.max_tokens)
            request = replace(request, min_tokens=min_tokens, repetition=rng.random() < 0.1, stops=rng.random() < 0.1)
        if beams and is_alone and rng.random() < 0.3:
            made.append(_search(rng, request, shape.settings["max_num_seqs"]))
        else:
            made.append(request)
    return made


def _search(rng: random.Random, request: SimRequest, most: int) -> SimRequest:
    """Return a beam search with the prompt of a request, perhaps with its grammar."""
    return replace(
        request,
        beams=min(rng.choice((1, 2, 3, 5)), most),
        max_tokens=rng.randrange(1, 9),
        ignore_eos=False,
        logprobs=None,
        prompt_logprobs=None,
        experts=False,
        min_tokens=0,
        stops=False,
        repetition=False,
        own=(request.own[0], max(1, request.own[1])),
    )


def _with_pooling(rng: random.Random, requests: list[SimRequest], *, encoder: bool) -> list[SimRequest]:
    """Return requests of which many are pooled, all for an encoder; others ask for routed experts."""
    parents = {request.fork[0] for request in requests}
    made = []
    for request in requests:
        may_generate = not encoder and (request.fork[0] or request.name in parents or rng.random() < 0.5)
        task = "" if may_generate else rng.choice(POOLING_TASKS)
        own = (request.own[0], rng.choice((request.own[1], 1, 16)))
        request = replace(request, task=task, own=own, fork=("", 0)) if task else request
        asks = not task and not request.fork[1]  # a client that forks itself does not tell its stream the known tokens
        made.append(replace(request, experts=asks and rng.random() < 0.4))
    return made


def _with_forks(rng: random.Random, requests: list[SimRequest]) -> list[SimRequest]:
    """Return half of the requests, and others with children and children of children, many with longer answers."""
    made: list[SimRequest] = []
    names: set[str] = set()
    for request in requests:
        if request.name in names or rng.random() < 0.6:
            made += [request][: rng.randrange(2)]
        else:
            parents = [replace(request, max_tokens=rng.choice((request.max_tokens, 12, 25)))]
            while parents:
                parent = parents.pop()
                made.append(parent)
                for _ in range(rng.choice((1, 1, 2, 3, 5)) if len(made) < 2 * len(requests) else 0):
                    child = _draw_child(rng, parent, f"f{len(made) + len(parents)}")
                    (parents if rng.random() < 0.3 else made).append(child)
        names.add(request.name)
    return made


def _draw_child(rng: random.Random, parent: SimRequest, name: str) -> SimRequest:
    then: Any = rng.choice((("", 0),) * 7 + (("abort", 1), ("stop", rng.randrange(5)), ("leave_at", 5)))
    return replace(
        parent,
        at=parent.at + rng.choice((0.0, 0.0, 0.001, 0.1, 1.0)),
        name=name,
        max_tokens=rng.choice((parent.max_tokens, rng.randrange(1, 30))),
        ignore_eos=not parent.even and rng.random() < 0.6,
        priority=rng.choice((parent.priority, parent.priority, 0, 5)),
        then=then,
        poison=None,
        prompt_logprobs=None,
        logprobs=rng.choice((None, None, 0, 2)),
        bug=None,
        fork=(parent.name, rng.choice((0, 0, 1, 2, 5, 10))),
    )


def _draw_request(
    rng: random.Random, index: int, at: float, poison: int | None, of_grammars: random.Random
) -> SimRequest:
    prefix = (rng.randrange(3), rng.choice((0, 0, 5, 8, 16, 24)))
    own = (rng.randrange(1000), rng.randrange(0, 12))
    even = of_grammars.random() < 0.1
    return SimRequest(
        at=round(at, 3),
        name=f"r{index}" if rng.random() < 0.97 or not index else f"r{rng.randrange(index)}",
        front=rng.randrange(6),
        prefix=prefix,
        own=own,
        max_tokens=rng.choice((1, 2, 8, rng.randrange(1, 30))),
        ignore_eos=rng.random() < 0.6 and not even,
        priority=rng.choice((0, 0, 1, 5, -3)),
        salt=rng.choice(("", "", "salt")),
        then=rng.choice(
            (("", 0),) * 7 + (("abort", rng.randrange(5)), ("stop", rng.randrange(5)), ("leave_at", rng.randrange(20)))
        ),
        poison=poison,
        prompt_logprobs=rng.choice((None, None, None, None, None, 0, 2)),
        even=even,
    )


def without(scenario: Scenario, field: str, which: range) -> Scenario:
    """Return the scenario without some of its ``requests`` or ``faults``."""
    if field == "requests":
        return replace(scenario, requests=tuple(a for i, a in enumerate(scenario.requests) if i not in which))
    return replace(scenario, faults=tuple(f for i, f in enumerate(scenario.faults) if i not in which))


__all__ = [
    "EOS",
    "KINDS",
    "MAX_MODEL_LEN",
    "Fault",
    "Scenario",
    "Shape",
    "SimRequest",
    "scenario_of",
    "shape_of",
    "without",
]
