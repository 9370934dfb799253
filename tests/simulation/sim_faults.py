"""Injects the faults of a simulated engine and counts them."""

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from fake_pages import FAULTS as PAGE_FAULTS
from fake_worker import Row, client_id
from sim_scenario import DEADLY, FRAME_DAMAGE, NUM_ADAPTERS, WRONG_RESULTS, Fault
from sim_violation import Violation
from sim_wire import Tamper

from quire.protocol.process.child import Report
from quire.protocol.wire.item_messages import Encode
from quire.scheduler_proc.process.loop import MAX_TOO_LARGE

if TYPE_CHECKING:
    from sim_process import SimProcess
    from sim_world import World

MOST_IN_A_ROW = 2
"""Deadly faults with no token in between that the scenario may cause; requests that kill cause others."""
MOST_KILLS = 7
"""Most worker deaths that one request may cause (F4): three at most if its last token was in flight at each of these
deaths and was committed after the third, which cleared it; then twice beside other requests and twice alone, if the
others got tokens in between."""
PAGE_FAULT_RATE = 0.03
ADAPTER_FAULT_RATE = 0.05
ITEM_FAULT_RATE = 0.05
HELD_S = (0.0, 0.05, 0.7, 12.0)
"""Seconds for which a dead process may hold its memory before its death can be noticed."""


class Faults:
    """Armed by the scenario, queried by the processes.

    Attributes:
        counts: faults so far by kind.
        in_a_row: deadly faults since the last committed token.
        num_deadly: all deadly faults.
        losses: epoch → time at which its workers were lost.
        bad_logits: requests with logits that were not finite.
        bad_items: keys of images that a worker could not encode.
        bad_adapters: digests of adapters of which a load has failed, or whose folder has another content.
    """

    def __init__(self, world: "World", seed: int) -> None:
        self._world = world
        self._events = world.events
        self.counts: Counter[str] = Counter()
        self.tamper = Tamper(random.Random(f"tamper {seed}"), self.count)
        self._dying = random.Random(f"dying {seed}")
        self.copies = random.Random(f"copies {seed}")
        """When copies of blocks run, and which pages are damaged."""
        self.most_in_a_row = MOST_IN_A_ROW
        self.in_a_row = self.num_deadly = 0
        self.losses: dict[int, float] = {}
        self.bad_logits: set[str] = set()
        self.bad_adapters: set[bytes] = set()
        self.bad_items: set[bytes] = set()
        self.wall_jump = 0.0
        self.disk_is_full = False
        self._armed: list[tuple[str, int]] = []
        """(kind, rank)"""
        self._oom_at: set[tuple[int, int]] = set()
        """(epoch, step): applies to all ranks when each of them runs the step."""
        self._oom_since: set[tuple[int, int]] = set()
        """Steps that ran out of memory since a request last got a token."""
        self._fronts_lost = 0
        """Front ends killed since one was last ready; too many of them end the engine."""
        self._not_reading: set[int] = set()
        self._kills: dict[str, set[int]] = {}
        """Epochs that a request has ended."""

    def end(self) -> None:
        """Stop all faults."""
        self._armed.clear()
        self.tamper.forget()

    def token_committed(self) -> None:
        """A token was committed: counts of consecutive faults restart."""
        self.in_a_row = 0
        self._oom_since.clear()

    def reported(self, process: "SimProcess", report: Report) -> None:
        """Called with each report before the supervision policy receives it."""
        is_loss = report.event == "group_failed" and report.worker_epoch == self._world.policy.worker_epoch
        if is_loss:
            self.lost(report.worker_epoch)
        # A token may have been committed after the first of them. By the rule, the workers count as lost.
        if is_loss and len(self._oom_since) >= MAX_TOO_LARGE - 1:
            self.count("oom without end")
        if report.event == "ready" and process.role == "frontend":
            self._fronts_lost = 0

    def lost(self, worker_epoch: int) -> None:
        """The workers of ``epoch`` died or are about to be replaced."""
        self.losses.setdefault(worker_epoch, self._events.now)

    def memory_held(self) -> float:
        """Draw the seconds for which a dying process holds its memory."""
        return self._dying.choice(HELD_S)

    def page_fault(self) -> str:
        """Return a fault for a page that is stored, or an empty string."""
        if self.copies.random() >= PAGE_FAULT_RATE:
            return ""
        self.count("page")
        return self.copies.choice(PAGE_FAULTS)

    def adapter_fault(self, digest: bytes) -> str:
        """Return a problem for the load of an adapter, or an empty string."""
        if self.copies.random() >= ADAPTER_FAULT_RATE:
            return ""
        self.count("adapter")
        self.bad_adapters.add(digest)
        return "adapter cannot be read"

    def item_fault(self, encode: Encode) -> str:
        """Return a problem for an image, or an empty string."""
        if self.copies.random() >= ITEM_FAULT_RATE:
            return ""
        self.count("image")
        self.bad_items.add(encode.item.key)
        return "image cannot be read"

    def count(self, kind: str) -> None:
        """Count a fault of this kind."""
        self.counts[kind] += 1
        if kind in DEADLY or kind == "oom without end":
            self.in_a_row += 1
            self.num_deadly += 1

    def inject(self, fault: Fault) -> None:
        """Apply a fault of the scenario now."""
        if fault.kind in DEADLY and self.in_a_row + len(self._armed) >= self.most_in_a_row:
            return
        direction, _, damage = fault.kind.partition(" ")
        workers = list(self._world.policy.group.values())
        match fault.kind:
            case _ if damage in FRAME_DAMAGE:
                self.tamper.arm(direction, damage)
            case "die_now" | "freeze" if workers:
                victim: Any = workers[fault.where % len(workers)].process
                self.count(fault.kind)
                if fault.kind == "freeze":
                    victim.frozen = True
                else:
                    victim.die("killed")
            case "die_all" if workers:
                self.count(fault.kind)
                for member in workers:
                    member.process.die("killed with the others")  # type: ignore[attr-defined]
            case "oom":
                scheduler = self._world.scheduler
                if scheduler is not None and scheduler.scheduler is not None:
                    self._oom_at.add((self._world.policy.worker_epoch, scheduler.scheduler.last_step + 1))
            case "scheduler_dies" | "scheduler_dies_twice":
                self._kill_scheduler(fault.kind)
            case "front_dies":
                front = self._world.fronts[fault.where % self._world.shape.num_fronts]
                if front.alive and self._fronts_lost < self.most_in_a_row:
                    self._fronts_lost += 1
                    self.count(fault.kind)
                    front.die("killed")
            case "not_reading":
                self._not_reading.add(fault.where % self._world.shape.num_fronts)
            case "clock_jump":
                self.count(fault.kind)
                self.wall_jump += 3600.0 if fault.where % 2 else -3600.0
            case "trace_full":
                self.count(fault.kind)
                self.disk_is_full = True
            case "reset":
                self.count(fault.kind)
                self._world.control(fault.where, "reset_prefix_cache")
                self._world.control(fault.where, "reset_encoder_cache")
            case "new content":
                self.count(fault.kind)
                self.bad_adapters.add(self._world.change_folder(fault.where % NUM_ADAPTERS))
            case "unload":
                front = self._world.fronts[fault.where % self._world.shape.num_fronts]
                if front.alive:
                    self.count(fault.kind)
                    front.unload_adapter(self._world.folders[fault.where % NUM_ADAPTERS])
            case "held":
                self._hold_all(fault.where)
            case "pause":
                self._pause_scheduler()
            case "die_now" | "freeze" | "die_all":
                pass  # no worker is running
            case kind:
                # Only rank 0 sends results. Other ranks can fail, or disagree by being right.
                rank = 0 if kind in WRONG_RESULTS else fault.where % self._world.shape.num_ranks
                if kind != "disagree" or self._world.shape.num_ranks > 1:
                    self._armed.append((kind, rank))

    def _kill_scheduler(self, kind: str) -> None:
        scheduler = self._world.scheduler
        if scheduler is None:
            return
        self.count(kind)
        scheduler.die("killed")
        if kind == "scheduler_dies_twice":
            again = self._world.shape.start_s * self.tamper.rng.uniform(0.5, 2.0) + 0.01
            self._events.after(again, lambda: self._kill_scheduler("scheduler_dies"))

    def _hold_all(self, where: int) -> None:
        """Pause the engine, with or without running requests; resume it a second later, as often as it takes."""
        self.count("held")
        self._world.control(where, ("pause", "pause_new")[where % 2])

        def resume() -> None:
            self._world.control(where, "resume")
            self._events.after(1.0, resume)

        self._events.after(1.0, resume)

    def _pause_scheduler(self) -> None:
        """Freeze the scheduler for two seconds of simulated time, as if it did not get a CPU."""
        scheduler = self._world.scheduler
        if scheduler is not None and not scheduler.frozen:
            self.count("pause")
            scheduler.frozen = True

            def go_on() -> None:
                scheduler.frozen = False
                scheduler.wake()

            self._events.after(2.0, go_on)

    def take_worker_fault(self, kind: str, rank: int) -> bool:
        """Whether this rank has an armed fault of this kind, which is used up."""
        wanted = next((armed for armed in self._armed if armed[0] == kind and (armed[1] == rank or rank < 0)), None)
        if wanted is None:
            return False
        self._armed.remove(wanted)
        self.count(kind)
        return True

    def is_out_of_memory(self, worker_epoch: int, step: int) -> bool:
        if (worker_epoch, step) not in self._oom_at:
            return False
        self.counts["oom"] += 1
        self._oom_since.add((worker_epoch, step))
        return True

    def is_not_reading(self, peer: bytes) -> bool:
        """Whether the front end ``peer`` does not read its messages now."""
        index = next(
            (i for i in self._not_reading if i in self._world.fronts and self._world.fronts[i]._peer == peer), None
        )
        if index is None:
            return False
        self._not_reading.discard(index)
        self.count("not_reading")
        return True

    def killed_by(self, name: str, worker_epoch: int) -> None:
        """A request has ended a worker. Raises Violation after ``MOST_KILLS`` times."""
        kills = self._kills.setdefault(name, set())
        if worker_epoch not in kills:  # otherwise another rank was counted
            kills.add(worker_epoch)
            self.count("poison")
        if len(kills) > MOST_KILLS * self._world.num_submissions[name]:
            raise Violation(f"{name} has ended the workers {len(kills)} times")

    def is_bug(self, name: str, num_output: int) -> bool:
        at = self._world.requests[client_id(name)].bug
        return at is not None and num_output >= at

    def is_poison(self, row: Row) -> bool:
        at = self._world.requests[client_id(row.request_id)].poison
        return at is not None and (at < 0 or len(row.tokens) - row.num_prompt_tokens > at)
