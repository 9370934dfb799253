"""Hostile loads for a Driver: any action of clients, front ends and workers, one random action at a time.

The same actions serve the state machine, the long run and the comparison of two schedulers: each is drawn from a
``random.Random`` and uses only what a client could know, or what is equal in both schedulers.
"""

import random
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from fake_adapters import adapter_ref, mix_of
from fake_worker import candidates_after, extend_context, pooled_row, prompt_logprob, routed_row
from log_replay import appended_blocks, describe
from scheduler_driver import VOCAB_SIZE, Answer, Driver, change, expected_tokens, make_request
from side_parts import with_rows

from quire.protocol.model.kv_layout import KVGroup, KVLayout
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.request.pooling_params import POOLING_TASKS, PoolingParams
from quire.protocol.request.sampling_params import SamplingParams
from quire.protocol.request.structured_outputs import RepetitionDetection, StructuredOutputs
from quire.protocol.wire.adapter_messages import AdapterRef, UnloadAdapter
from quire.protocol.wire.front_end_messages import CallsTool, EndReason, StepOutputs
from quire.protocol.wire.side_rows import POOLED, ROUTED_EXPERTS, find_rows
from quire.protocol.wire.worker_messages import ModelRunnerOutput, SchedulerOutput
from quire.scheduler_proc.features.beams.search import BeamSearch
from quire.scheduler_proc.requests.events import Clock

EOS = list(range(0, VOCAB_SIZE, 40))
MAX_MODEL_LEN = 40
NUM_CLIENTS = 3
NUM_ADAPTERS = 7


@dataclass
class Asked:
    """A request as its client sent it.

    ``gone``: it may have ended before its time. ``bad``: output token from which its logits are not finite, or from
    which it fails for a reason of its own. ``may_fail``: its adapter's folder has another content by now.
    ``has_grammar``: a stop token among its first ``min_tokens`` ends it, because the grammar allows nothing else.
    """

    client: int
    prompt: list[int]
    max_tokens: int
    stops: frozenset[int]
    output: list[int]
    gone: bool = False
    bad: int | None = None
    min_tokens: int = 0
    repetition: RepetitionDetection | None = None
    prompt_logprobs: int | None = None
    salt: str = ""
    tenant: int = 0
    search: SamplingParams | None = None
    adapter: AdapterRef | None = None
    may_fail: bool = False
    pooling: PoolingParams | None = None
    experts: bool = False
    has_grammar: bool = False


def random_layout(rng: random.Random) -> KVLayout:
    """Return one to three groups; block sizes are multiples of the smallest."""
    smallest = rng.choice((1, 2, 4))
    kinds = ["full_attention", "sliding_window"]
    groups = [KVGroup(rng.choice(kinds), smallest, [0], rng.randrange(1, 12))]
    for _ in range(rng.randrange(3)):
        groups.append(KVGroup(rng.choice(kinds), smallest * rng.choice((1, 1, 2, 3)), [0], rng.randrange(1, 12)))
    rng.shuffle(groups)
    return KVLayout(groups, num_kv_heads=1, head_dim=4, dtype="float32")


def random_settings(rng: random.Random, *, hybrid: bool = True, drafts: bool = True) -> dict[str, Any]:
    """Return arguments of a Driver with tiny pools, odd chunk sizes and any combination of switches."""
    layout = random_layout(rng) if hybrid and rng.random() < 0.6 else None
    num_drafts = rng.choice((0, 0, 1, 3)) if drafts else 0
    asynchronous = rng.random() < 0.7
    max_num_seqs = rng.choice((1, 3, 8))
    least = max_num_seqs * (1 + num_drafts)
    chunked = rng.random() < 0.8
    num_blocks = rng.choice((6, 10, 14, 40, 60))
    return {
        "layout": layout,
        "num_blocks": num_blocks,
        "num_host_pages": (0, 6, 60)[(num_blocks + max_num_seqs) % 3],  # without another random number
        "block_size": rng.choice((1, 2, 4, 8)),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(least, rng.choice((8, 13, 64)) if chunked else MAX_MODEL_LEN),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.85,
        "long_prefill_token_threshold": rng.choice((0, 0, 3, 7)) if chunked else 0,
        "max_prefill_share": rng.choice((0.1, 0.5, 1.0)),
        "async_scheduling": asynchronous,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "reserve_full_sequence": rng.random() < 0.1,
        "watermark": rng.choice((0.0, 0.0, 0.1)),
        "kv_pressure_high": (0.8, 1.0, 1.0)[(num_blocks + least) % 3],
        "kv_pressure_low": (0.5, 1.0, 1.0)[(num_blocks + least) % 3],
        "max_num_queued_reqs": rng.choice((0, 0, 4)),
        "num_speculative_tokens": num_drafts,
        "adaptive": rng.random() < 0.7,
        "enable_return_routed_experts": True,
        "eos": EOS,
    }


def adapter_settings(rng: random.Random) -> dict[str, Any]:
    """Return arguments of a Driver with few slots for many adapters."""
    max_loras = rng.choice((1, 1, 2, 4))
    return {"enable_lora": True, "max_loras": max_loras, "max_cpu_loras": max_loras + rng.choice((1, 1, 3))}


def program_settings(rng: random.Random) -> dict[str, Any]:
    """Return arguments of a Driver with a policy that needs programs."""
    return {"scheduling_policy": rng.choice(("program", "continuum")), "enable_prefix_caching": True}


def pooling_settings(rng: random.Random) -> dict[str, Any]:
    """Return arguments of a Driver whose model generates, and pools in all ways."""
    pooling = PoolingConfig(
        tasks=["embed", "token_embed", "classify"],
        pooling=rng.choice(("last", "last", "mean", "cls")),
        size=6,
        labels=["yes", "no"],
    )
    return {"pooling": pooling}


def encoder_settings(rng: random.Random) -> dict[str, Any]:
    """Return arguments of a Driver whose model keeps no KV, and only pools."""
    return pooling_settings(rng) | {
        "generates": False,
        "layout": KVLayout([], num_kv_heads=1, head_dim=4, dtype="float32"),
        "num_blocks": 2,
        "num_host_pages": 0,
        "enable_chunked_prefill": False,
        "long_prefill_token_threshold": 0,
        "max_num_batched_tokens": rng.choice((MAX_MODEL_LEN, 64)),
        "num_speculative_tokens": 0,
    }


EVENTS = {
    "arrive": 30,
    "fork": 10,
    "search": 6,
    "abort": 4,
    "stop": 4,
    "leave": 1,
    "hold": 3,
    "hold_beam": 2,
    "release": 4,
    "refuse": 1,
    "fail": 1,
    "pause": 1,
    "resume": 4,
    "reset_prefix_cache": 1,
    "change_budget": 2,
    "begin_worker_epoch": 1,
    "damaged_result": 3,
}
"""Methods of Load, with their weights in a run without hypothesis."""

ADAPTER_EVENTS = EVENTS | {"reload_adapter": 4, "unload_adapter": 6, "kill_worker": 1}
"""The same for engines with adapters."""


PROGRAM_EVENTS = EVENTS | {"pass_time": 10, "call_tool": 6, "kill_worker": 1}
"""The same for engines with programs."""


POOLING_EVENTS = EVENTS | {"pool": 30, "kill_worker": 1}
"""The same for models that pool."""


FLOOD = (0, 0, 0, 1, 0, 2, 0, 1)
"""The clients of the requests, in turn, where there are several tenants."""


class Load:
    """One Driver, or two that must not differ, under the same events.

    ``drivers[0]`` is inspected where an event depends on the state; ``rng`` may be replaced between events.
    ``fixed_budget``: for runs that are replayed, because an event log does not record changes of the budget.
    """

    def __init__(self, rng: random.Random, *drivers: Driver) -> None:
        self.rng = rng
        self.drivers = drivers
        self.driver = drivers[0]
        self.asked: dict[str, Asked] = {}
        self.held: dict[str, int] = {}
        self.prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
        fixed, each, drafted = rng.choice(((0.0, 0.0, 0.0), (1.0, 0.01, 0.0), (1.0, 0.5, 0.0), (1.0, 0.01, 3.0)))
        quality = rng.choice((0.0, 0.4, 0.6, 0.95))
        for driver in drivers:
            driver.worker.step_seconds = lambda tokens, drafts: fixed + each * tokens + drafted * (drafts > 0)
            driver.worker.draft_quality = quality
        self.fixed_budget = False
        self.num_tenants = 1
        self.adapter_rng = random.Random(f"adapters {rng.getstate()[1][0]}")
        """Chance for adapters, so that engines without them draw the same as before."""
        self.program_rng = (
            random.Random(f"programs {rng.getstate()[1][0]}") if self.driver.config.uses_programs else None
        )
        self.pooling_rng = random.Random(f"pooling {rng.getstate()[1][0]}")
        """Chance for pooled requests and routed experts, for the same reason."""
        self.now, self.num_jobs = 0.0, 4
        self._contents = [0] * NUM_ADAPTERS if self.driver.config.enable_lora else []
        """A content for each name of an adapter."""
        self.num_epochs = self.num_damaged = self.num_kills = 0

    # ---- events

    def arrive(self) -> None:
        """Add a request, perhaps with a shared prefix, perhaps resubmitted after a crash."""
        rng = self.rng
        if not self.driver.config.model.generates:
            self.pool()
        if len(self.driver.scheduler.table.requests) >= 14 or not self.driver.config.model.generates:
            return
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(0, 12))]
        prompt = (rng.choice(self.prefixes)[: rng.choice((0, 5, 8, 16, 24))] + own)[: MAX_MODEL_LEN - 2] or [1]
        max_tokens = rng.choice((1, 2, rng.randrange(1, 30)))
        ignore_eos = rng.random() < 0.6
        stops = [] if rng.random() < 0.8 else rng.sample(range(VOCAB_SIZE), 30)
        output = []
        if rng.random() < 0.1:
            output = expected_tokens(prompt, rng.randrange(1, 4))
            stops, ignore_eos = [], True
        request_id = f"r{len(self.asked)}"
        asked = Asked(rng.randrange(NUM_CLIENTS), prompt, max_tokens, frozenset(stops), output)
        if not ignore_eos:
            asked.stops |= frozenset(EOS)
        fails = rng.random() < 0.3
        if rng.random() < 0.08:
            asked.bad = rng.randrange(6)
        asked.min_tokens = min(rng.choice((0, 0, 0, 5)), max_tokens)
        asked.prompt_logprobs = rng.choice((None, None, None, None, 0, 2))
        if rng.random() < 0.1:
            asked.repetition = RepetitionDetection(max_pattern_size=3, min_count=2)
        grammar = StructuredOutputs(regex="a*") if not ignore_eos and rng.random() < 0.2 else None
        asked.has_grammar = grammar is not None
        asked.experts = self._asks_for_experts()
        self.asked[request_id] = asked
        priority, salt = rng.choice((0, 0, 1, 5, -3)), rng.choice(("", "", "salt"))
        tenant = FLOOD[len(self.asked) % len(FLOOD)] % self.num_tenants
        asked.salt, asked.tenant, asked.adapter = salt, tenant, self._any_adapter()
        job = self._any_job()
        if output:
            asked.output = output = expected_tokens(prompt, len(output), adapter=asked.adapter)
        for driver in self.drivers:
            if asked.bad is not None:
                (driver.worker.failed_at if fails else driver.worker.bad_from)[request_id] = asked.bad
            driver.add(
                request_id,
                prompt,
                output,
                client=asked.client,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                stop_token_ids=stops,
                priority=priority,
                arrival=float(len(self.asked)),
                cache_salt=salt,
                min_tokens=asked.min_tokens,
                prompt_logprobs=asked.prompt_logprobs,
                return_routed_experts=asked.experts,
                repetition_detection=asked.repetition,
                structured_outputs=grammar,
                tenant=tenant,
                adapter=asked.adapter,
                **job,
            )

    def _asks_for_experts(self) -> bool:
        return self.driver.config.model.pooling is not None and self.pooling_rng.random() < 0.4

    def pool(self) -> None:
        """Add a request whose prompt is turned into vectors or scores."""
        rng, request_id = self.pooling_rng, f"r{len(self.asked)}"
        if len(self.driver.scheduler.table.requests) >= 14:
            return
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 1, 5, 11, 30)))]
        prompt = (rng.choice(self.prefixes)[: rng.choice((0, 5, 8, 16, 24))] + own)[:MAX_MODEL_LEN] or [1]
        asked = Asked(rng.randrange(NUM_CLIENTS), prompt, 0, frozenset(), [])
        task = rng.choice(POOLING_TASKS)
        asked.pooling = PoolingParams(task, 0 if task == "classify" else rng.choice((0, 0, 3, 6)))
        asked.bad = rng.choice((None,) * 12 + (0,))
        asked.salt, asked.tenant = rng.choice(("", "", "salt")), FLOOD[len(self.asked) % len(FLOOD)] % self.num_tenants
        asked.adapter = self._any_adapter()
        fails, priority = rng.random() < 0.3, rng.choice((0, 0, 1, 5, -3))
        self.asked[request_id] = asked
        for driver in self.drivers:
            if asked.bad is not None:
                (driver.worker.failed_at if fails else driver.worker.bad_from)[request_id] = asked.bad
            driver.add(
                request_id,
                prompt,
                client=asked.client,
                pooling=asked.pooling,
                structured_outputs=StructuredOutputs(regex="a*"),
                priority=priority,
                arrival=float(len(self.asked)),
                cache_salt=asked.salt,
                tenant=asked.tenant,
                adapter=asked.adapter,
            )

    def _any_job(self) -> dict[str, Any]:
        """Return fields of a turn of one of a few jobs, of which some end and are followed by others; or of none."""
        rng = self.program_rng
        if rng is None or rng.random() < 0.3:
            return {}
        is_last_step = rng.random() < 0.1
        self.num_jobs += is_last_step
        return {"job_id": f"job {self.num_jobs - rng.randrange(4)}", "is_last_step": is_last_step}

    def pass_time(self) -> None:
        assert self.program_rng is not None
        self.now += self.program_rng.choice((0.05, 1.0, 5.0, 300.0))
        for driver in self.drivers:
            driver.consume(Clock(self.now))

    def call_tool(self) -> None:
        """Report a tool of the newest request."""
        assert self.program_rng is not None
        tool = self.program_rng.choice(("grep", "make", ""))
        request_id = f"r{len(self.asked) - 1}"
        for driver in self.drivers:
            driver.consume(CallsTool(request_id, tool), self.asked[request_id].client if self.asked else 0)

    def _any_adapter(self) -> AdapterRef | None:
        """Return an adapter, often one of the first two, or None."""
        rng = self.adapter_rng
        if not self._contents or rng.random() < 0.3:
            return None
        return self._adapter(rng.choice((0, 0, 1, rng.randrange(NUM_ADAPTERS))))

    def _adapter(self, name: int) -> AdapterRef:
        return adapter_ref(f"adapter {name}", f"{name} {self._contents[name]}")

    def reload_adapter(self) -> None:
        """Put another content into the folder of an adapter. The previous one can be loaded no more."""
        name = self.adapter_rng.randrange(NUM_ADAPTERS)
        self._contents[name] += 1
        adapter = self._adapter(name)
        for asked in self.asked.values():
            asked.may_fail |= asked.adapter is not None and asked.adapter.name == adapter.name
        for driver in self.drivers:
            driver.worker.adapters.folders[adapter.path] = adapter.digest

    def unload_adapter(self) -> None:
        adapter, force = self._adapter(self.adapter_rng.randrange(NUM_ADAPTERS)), self.adapter_rng.random() < 0.2
        for asked in self.asked.values():
            asked.gone |= force and asked.adapter == adapter
        for driver in self.drivers:
            driver.consume(UnloadAdapter(adapter.name, adapter.digest, force))

    def kill_worker(self) -> None:
        """Replace the worker, but not when a request may be suspected a third time, which would end it."""
        if self.num_kills < 2:
            self.num_kills += 1
            for driver in self.drivers:
                driver.restart_worker()

    def search(self) -> None:
        """Add a beam search."""
        rng, request_id = self.rng, f"r{len(self.asked)}"
        if len(self.driver.scheduler.table.requests) >= 14 or not self.driver.config.model.generates:
            return
        prompt = [*rng.choice(self.prefixes)[: rng.choice((1, 5, 8, 16))], rng.randrange(VOCAB_SIZE)]
        asked = Asked(rng.randrange(NUM_CLIENTS), prompt, rng.randrange(1, 9), frozenset(EOS), [])
        asked.salt, asked.tenant = rng.choice(("", "salt")), FLOOD[len(self.asked) % len(FLOOD)] % self.num_tenants
        if rng.random() < 0.1:
            asked.bad = rng.randrange(6)
        asked.adapter = self._any_adapter()
        asked.search = SamplingParams(
            use_beam_search=True,
            beam_width=rng.choice((1, 2, 3, 5)),
            length_penalty=rng.choice((-1.0, 0.0, 1.0)),
            early_stopping=rng.choice((False, True, "never")),
            max_tokens=asked.max_tokens,
            structured_outputs=StructuredOutputs(regex="a*") if rng.random() < 0.3 else None,
        )
        self.asked[request_id] = asked
        for driver in self.drivers:
            if asked.bad is not None:
                driver.worker.bad_from[request_id] = asked.bad
            driver.salts[request_id] = asked.salt
            driver.answers[request_id] = Answer()
            arrival = float(len(self.asked))
            request = make_request(request_id, prompt, arrival=arrival, cache_salt=asked.salt, tenant=asked.tenant)
            request = change(request, adapter=asked.adapter)
            driver.consume(change(request, sampling=asked.search), asked.client)

    def fork(self) -> None:
        """Fork any request into several, at any token."""
        parent = self._anyone()
        if parent is None or self.asked[parent].search is not None or self.asked[parent].pooling is not None:
            return
        of, request = self.asked[parent], self.driver.request(parent, self.asked[parent].client)
        known = (
            request.num_output_tokens if self.rng.random() < 0.5 else self.rng.randrange(request.num_output_tokens + 1)
        )
        output = expected_tokens(of.prompt, known, adapter=of.adapter)
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            request_id = f"r{len(self.asked)}"
            max_tokens = self.rng.randrange(len(output) + 1, max(40, len(output) + 2))
            asked = Asked(of.client, of.prompt, max_tokens, frozenset(), output, salt=of.salt, tenant=of.tenant)
            asked.adapter, asked.may_fail, asked.experts = of.adapter, of.may_fail, self._asks_for_experts()
            if self.rng.random() < 0.1:
                asked.bad = self.rng.randrange(6)
            self.asked[request_id] = asked
            grammar = StructuredOutputs(regex="a*") if self.rng.random() < 0.2 else None
            if grammar is not None:
                asked.stops = frozenset(EOS)
            for driver in self.drivers:
                if asked.bad is not None:
                    driver.worker.bad_from[request_id] = asked.bad
                driver.add(
                    request_id,
                    [],
                    client=asked.client,
                    forked_from=parent,
                    num_forked_tokens=len(of.prompt) + known,
                    max_tokens=max_tokens,
                    ignore_eos=grammar is None,
                    priority=request.priority,
                    arrival=float(len(self.asked)),
                    cache_salt=of.salt,
                    structured_outputs=grammar,
                    return_routed_experts=asked.experts,
                    tenant=of.tenant,
                )

    def abort(self) -> None:
        if (victim := self._anyone()) is not None:
            self.asked[victim].gone = True
            for driver in self.drivers:
                driver.abort(victim, "nobody", client=self.asked[victim].client)

    def stop(self) -> None:
        """Stop a request as a front end does: the stop string was in the tokens received so far."""
        victim = self._anyone()
        if victim is not None and (known := len(self.driver.answers[victim].tokens)):
            self.asked[victim].gone = True
            told = self.rng.randrange(known + 1)
            for driver in self.drivers:
                driver.stop(victim, told, self.asked[victim].client)

    def leave(self) -> None:
        client = self.rng.randrange(NUM_CLIENTS)
        for owner, request_id in self.driver.scheduler.table.requests:
            if owner == client and owner >= 0:
                self.asked[request_id].gone = True
        for driver in self.drivers:
            driver.drop_client(client)

    def hold(self) -> None:
        """Release any request; a request that is not held is not affected."""
        if (victim := self._anyone()) is not None:
            client, reason = self.asked[victim].client, self.rng.choice(("grammar", "remote_kv", "streaming"))
            self.held[victim] = client
            for driver in self.drivers:
                driver.hold(victim, reason, client)

    def hold_beam(self) -> None:
        """Hold a beam, as when its masks are late."""
        beams = [request_id for client, request_id in self.driver.scheduler.table.requests if client < 0]
        if beams:
            beam = self.rng.choice(beams)
            self.held[beam] = -1
            for driver in self.drivers:
                driver.hold(beam, "grammar", -1)

    def release(self) -> None:
        if self.held:
            request_id = self.rng.choice(list(self.held))
            client = self.held.pop(request_id)
            for driver in self.drivers:
                driver.release(request_id, client)

    def refuse(self) -> None:
        """Hold or release a request that is held, or one that has ended."""
        if held := [request_id for request_id, client in self.held.items() if client >= 0]:
            request_id = self.rng.choice(held)
            client = self.held.pop(request_id)
            self.asked[request_id].gone = True
            for driver in self.drivers:
                driver.refuse(request_id, client)

    def fail(self) -> None:
        if (victim := self._anyone()) is not None:
            self.asked[victim].gone = True
            for driver in self.drivers:
                driver.fail(victim, self.asked[victim].client)

    def pause(self) -> None:
        self.control(self.rng.choice(("pause", "pause_new")))

    def resume(self) -> None:
        self.control("resume")

    def reset_prefix_cache(self) -> None:
        self.control("reset_prefix_cache")

    def control(self, kind: str) -> None:
        told = [driver.control(kind) for driver in self.drivers]
        assert all(t == told[0] for t in told), f"statistics differ: {told}"

    def change_budget(self) -> None:
        """Make the batch limit smaller or larger: the only way in which decoding requests get no scheduled tokens."""
        config = self.driver.config
        if config.enable_chunked_prefill and not self.fixed_budget:
            most = config.max_num_batched_tokens
            budget = min(self.rng.choice((1, 2, 3, most, most)), most)
            for driver in self.drivers:
                driver.scheduler.config = change(config, max_num_batched_tokens=budget)

    def begin_worker_epoch(self) -> None:
        self.num_epochs += 1
        for driver in self.drivers:
            driver.begin_worker_epoch()

    def damaged_result(self) -> None:
        """Deliver an impossible result, of which nothing is applied. Then the right one arrives, or a new worker epoch
        begins."""
        kind, afresh = self.rng.randrange(4), self.rng.random() < 0.5
        done = [driver.deliver_damaged(lambda result: damaged(result, kind)) for driver in self.drivers]
        self.num_damaged += done[0]
        if done[0] and afresh:
            self.begin_worker_epoch()

    def random_event(self) -> None:
        """Apply any of EVENTS, then a few steps."""
        events = ADAPTER_EVENTS if self._contents else PROGRAM_EVENTS if self.program_rng is not None else EVENTS
        if self.driver.config.model.pooling is not None:
            events = events | POOLING_EVENTS
        (name,) = self.rng.choices(list(events), list(events.values()))
        getattr(self, name)()
        for _ in range(self.rng.randrange(1, 10)):
            self.advance()

    def _anyone(self) -> str | None:
        alive = [request_id for client, request_id in self.driver.scheduler.table.requests if client >= 0]
        return self.rng.choice(alive) if alive else None

    # ---- steps

    def advance(self) -> None:
        """Do one random thing that may happen next: results arrive as late as the pipeline allows."""
        action = self.rng.choice(("schedule", "schedule", "execute", "deliver"))
        if self._contents and self.adapter_rng.random() < 0.3:
            for driver in self.drivers:
                driver.move(len(driver.worker.host.pending))
        running = set(self.driver.scheduler.table.running)
        if action == "schedule":
            diffs = [driver.schedule() for driver in self.drivers]
            if len(diffs) > 1:
                told = ["nothing" if diff is None else describe(diff) for diff in diffs]
                assert all(t == told[0] for t in told), f"decided {told}"
            if diffs[0] is not None:
                self.check_step(diffs[0], running)
        for driver in self.drivers:
            if action == "execute":
                driver.execute()
            elif action == "deliver":
                driver.deliver()
        if len(self.drivers) > 1:
            assert len({told_to_clients(driver) for driver in self.drivers}) == 1, "clients heard different things"
            counters = [counters_of(driver) for driver in self.drivers]
            assert all(each == counters[0] for each in counters), "other counters, in steady decode or out of it"

    def check_step(self, diff: SchedulerOutput, running: set[int]) -> None:
        """I14: no request is admitted before one that arrived earlier (or has priority) and could have been
        admitted. ``running``: handles of requests that were admitted before, without a turn of their adapter."""
        table, suspects = self.driver.scheduler.table, self.driver.scheduler.suspects
        if suspects.alone is not None:
            assert list(table.running.values()) == [suspects.alone], "somebody runs beside who is to run alone"
        elif diff.new_requests and table.waiting:
            by_handle = {r.handle: r for r in table.running.values()}
            for request in [by_handle[new.handle] for new in diff.new_requests if new.handle not in running]:
                behind = [table.waiting.key(r) for r in table.waiting if r.tenant == request.tenant]
                assert all(table.waiting.key(request) <= key for key in behind), "somebody was overtaken"
        assert 0 not in [block for _, group, block in appended_blocks(diff) if self._is_full(group)]

    def _is_full(self, group: int) -> bool:
        return self.driver.worker.groups[group].kind == "full_attention"

    # ---- the end

    def drain(self, patience: int = 64) -> None:
        """Remove all obstacles; each request must then end, and each round must make progress."""
        self.control("resume")
        while self.held:
            self.release()
        for driver in self.drivers:
            driver.scheduler.config = driver.config
            before, idle = -1, 0
            while driver.scheduler.table.requests or driver.scheduler.in_flight:
                driver.step()
                done = driver.scheduler.num_results + sum(a.ended is not None for a in driver.answers.values())
                idle = 0 if done > before else idle + 1
                before = max(done, before)
                assert idle < patience, f"nothing happens: {list(driver.scheduler.table.requests.values())}"
            driver.settle()

    def check_answers(self) -> None:
        for driver in self.drivers:
            driver.check_drained()
            assert all(answer.num_cached_tokens < MAX_MODEL_LEN for answer in driver.answers.values())
            for request_id, asked in self.asked.items():
                self._check_answer(driver, request_id, asked)

    def _check_answer(self, driver: Driver, request_id: str, asked: Asked) -> None:
        """Check that the stream equals the tokens that the prompt alone gives, up to where this request had to end."""
        answer = driver.answers[request_id]
        if answer.rejected is not None:
            assert (
                answer.rejected.code
                in ("kv_pool_too_small", "queue_full", "invalid_grammar", "invalid_value", "job_ended")
                or (asked.may_fail and answer.rejected.code == "adapter_not_loaded")
            ) and not (answer.tokens or answer.pooled or answer.experts)
            return
        if asked.pooling is not None:
            check_pooled(driver, asked, answer)
            return
        if asked.search is not None:
            check_search(driver, asked, answer)
            return
        limit = min(MAX_MODEL_LEN, driver.scheduler.kv.max_tokens + 1) - len(asked.prompt)
        limit = min(limit, asked.max_tokens) - len(asked.output)
        want = expected_tokens([*asked.prompt, *asked.output], max(limit, 0), adapter=asked.adapter)
        least = 0 if asked.has_grammar else asked.min_tokens
        ends = [i for i, token in enumerate(want) if token in asked.stops and i >= least]
        want = want[: ends[0] + 1] if ends else want
        reason = EndReason.STOPPED if ends else EndReason.LENGTH
        if (repeated := first_repetition([*asked.output, *want], asked)) is not None:
            reached = max(repeated - len(asked.output), 0)
            if reached < len(want):  # another ending at the same token takes precedence
                want, reason = want[:reached], EndReason.REPETITION
        bad = None if asked.bad is None else max(asked.bad - len(asked.output), 0)
        assert answer.tokens == want[: len(answer.tokens)], f"{request_id}: another stream than alone"
        assert answer.ended is not None
        if asked.gone or (asked.may_fail and answer.ended.detail.startswith("adapter_not_loaded")):
            return
        # Drafts that were accepted together with a stop token, and follow it, may be the bad ones.
        beyond = len(want) + driver.config.num_speculative_tokens
        if bad is not None and (bad < len(want) or (answer.reason is EndReason.ERROR and bad < beyond)):
            assert answer.reason is EndReason.ERROR and len(answer.tokens) <= bad, f"{request_id}: bad logits passed"
        else:
            assert answer.tokens == want, f"{request_id}: not all of its tokens"
            assert answer.reason is reason
            assert answer.ended.num_output_tokens == len(want) + len(asked.output)
        if answer.tokens or not asked.experts:
            check_experts(asked, answer)
        if asked.prompt_logprobs is not None and answer.tokens:
            assert answer.num_cached_tokens == 0 and answer.prompt_logprobs == prompt_logprobs_of(asked.prompt)


def check_pooled(driver: Driver, asked: Asked, answer: Answer) -> None:
    """Check that a pooled request got the rows that its prompt alone gives, all of them unless it ended early."""
    params, pooling = asked.pooling, driver.config.model.pooling
    assert params is not None and pooling is not None and answer.ended is not None and not answer.tokens
    mix, width = (
        0 if asked.adapter is None else mix_of(asked.adapter.digest),
        pooling.width(params.task, params.dimensions),
    )
    contexts = contexts_of(asked.prompt)
    contexts = contexts if params.task == "token_embed" else contexts[-1:]
    want = dict(enumerate(pooled_row(context ^ mix, width) for context in contexts))
    assert answer.pooled == {at: want[at] for at in answer.pooled}, "other rows than alone"
    assert answer.ended.num_output_tokens == 0
    assert answer.num_cached_tokens <= 0 or not pooling.needs_every_token(params.task)
    if asked.gone or (asked.may_fail and answer.ended.detail.startswith("adapter_not_loaded")):
        return
    if asked.bad is not None:
        assert answer.reason is EndReason.ERROR and len(answer.pooled) < len(want), "bad hidden states passed"
    else:
        assert answer.reason is EndReason.STOPPED and answer.pooled == want, "not all of its rows"


def check_experts(asked: Asked, answer: Answer) -> None:
    """Check that a request got the routed experts of all its tokens but the last, if it asked for them."""
    known = [*asked.prompt, *asked.output]
    tokens = [*known, *expected_tokens(known, MAX_MODEL_LEN, adapter=asked.adapter)]  # also drafts after its end
    want = dict(enumerate(map(routed_row, contexts_of(tokens))))
    assert answer.experts == {at: want[at] for at in answer.experts}, "other experts than alone"
    least = len(known) + len(answer.tokens) - 1 if asked.experts else 0
    assert len(answer.experts) >= least and (asked.experts or not answer.experts), "not the experts of all its tokens"


def contexts_of(tokens: list[int]) -> list[int]:
    """Return the context up to each token."""
    contexts = [0]
    for token in tokens:
        contexts.append(extend_context(contexts[-1], token))
    return contexts[1:]


def check_search(driver: Driver, asked: Asked, answer: Answer) -> None:
    """Check that a search found what it finds without a scheduler."""
    params = asked.search
    assert params is not None and not answer.tokens and answer.ended is not None
    if asked.gone or answer.reason is EndReason.ERROR:
        assert asked.gone or asked.bad is not None or asked.may_fail
        return
    limit = min(MAX_MODEL_LEN, driver.scheduler.kv.max_tokens + 1) - len(asked.prompt)
    search = BeamSearch(params, asked.stops, min(limit, asked.max_tokens))
    beams = [0]
    for token in asked.prompt:
        beams = [extend_context(beams[0], token)]
    assert params.num_candidates is not None
    mix = 0 if asked.adapter is None else mix_of(asked.adapter.digest)
    while True:
        found = [candidates_after(context ^ mix, params.num_candidates, VOCAB_SIZE) for context in beams]
        choice = search.step([[(token, float(np.float32(value))) for token, value in own] for own in found])
        if choice is None:
            break
        beams = [extend_context(beams[at], token) for at, token in zip(choice.parents, choice.tokens, strict=True)]
    assert answer.hypotheses == search.ended, "another search than alone"
    assert answer.ended.num_output_tokens == sum(len(each.tokens) for each in search.ended)


def first_repetition(answer: list[int], asked: Asked) -> int | None:
    """Return after how many tokens the output has repeated itself often enough, by the definition."""
    limits = asked.repetition
    if limits is None:
        return None
    for end in range(max(1, asked.min_tokens), len(answer) + 1):
        for size in range(limits.min_pattern_size, limits.max_pattern_size + 1):
            start = end - size * limits.min_count
            if start >= 0 and answer[start:end] == answer[end - size : end] * limits.min_count:
                return end
    return None


def prompt_logprobs_of(prompt: list[int]) -> dict[int, tuple[int, float]]:
    """Return the fake worker's log probabilities of the tokens of a prompt, without the first."""
    contexts = contexts_of(prompt)
    return {at: (token, prompt_logprob(contexts[at])) for at, token in enumerate(prompt) if at}


def counters_of(driver: Driver) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return the progress of each live request."""
    return {
        key: (
            request.num_tokens,
            request.num_computed_tokens,
            request.num_acknowledged_tokens,
            request.num_output_placeholders,
            request.num_in_flight,
            request.num_tokens_to_compute,
        )
        for key, request in driver.scheduler.table.requests.items()
    }


def told_to_clients(driver: Driver) -> str:
    """Return the last messages; the order of clients and of new handles has no meaning."""
    steps = [(client, m) for client, m in driver.messages if isinstance(m, StepOutputs)]
    steps.sort(key=itemgetter(0))
    return repr([(client, change(m, introduced=sorted(m.introduced, key=repr))) for client, m in steps])


def damaged(result: ModelRunnerOutput, kind: int) -> ModelRunnerOutput:
    """Return results that no worker that follows the protocol would send."""
    if (pooled := find_rows(result.side, POOLED)) is not None and kind:
        handles, starts, widths = pooled.handles, pooled.starts, pooled.widths
        wrong = ([*handles[1:], 999], starts, widths), (handles, [1 + each for each in starts], widths)
        told = *wrong, (handles, starts, [1 + each for each in widths])
        handles, starts, widths = told[kind - 1]
        return with_rows(result, POOLED, change(pooled, handles=handles, starts=starts, widths=widths))
    if (experts := find_rows(result.side, ROUTED_EXPERTS)) is not None and kind == 1:
        return with_rows(result, ROUTED_EXPERTS, change(experts, widths=[each + 1 for each in experts.widths]))
    if kind == 1 and result.tokens is not None:
        return change(result, tokens=np.append(result.tokens[1:], VOCAB_SIZE).astype(np.int32))
    if kind == 2 and result.tokens is not None:
        return change(result, tokens=np.append(result.tokens, 1).astype(np.int32))
    if kind == 3 and result.handles is not None and len(result.handles):
        return change(result, handles=np.append(result.handles[1:], 999).astype(np.int32))
    return change(result, step=result.step + 1)
