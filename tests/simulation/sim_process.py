"""What all simulated processes share: a pid, heartbeats, and an exit that the supervision policy notices."""

from typing import TYPE_CHECKING

from quire.protocol.process.child import Command, Report

if TYPE_CHECKING:
    from sim_world import World

PIPE_S = 0.001
HEARTBEAT_S = 3.0


class SimProcess:
    """Implements ``policy.Process``.

    Attributes:
        hung: its main loop is stuck; heartbeats continue.
        frozen: nothing in it runs.
    """

    role = ""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.pid = world.next_pid()
        self.alive = True
        self.hung = self.frozen = False
        world.events.after(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        if self.alive:
            if not self.frozen:
                self.report(Report("alive"))
            self.world.events.after(HEARTBEAT_S, self._beat)

    def report(self, report: Report) -> None:
        world = self.world
        world.events.after(PIPE_S, lambda: world.reported(self, report))

    def send(self, command: Command) -> None:
        self.world.events.after(PIPE_S, lambda: self.on_command(command) if self.alive else None)

    def on_command(self, command: Command) -> None:
        raise NotImplementedError

    def die(self, how: str) -> None:
        """Exit by itself or by a signal; the supervisor notices after its memory is freed."""
        if not self.alive:
            return
        self.vanish()
        world = self.world
        world.events.after(2 * PIPE_S + world.faults.memory_held(), lambda: world.ended(self, how))

    def vanish(self) -> None:
        """End it without notice: the supervisor killed it."""
        self.alive = False
