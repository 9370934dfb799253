"""What all simulated processes share: a number, signs of life, and a death that the Overseer hears of."""

from typing import TYPE_CHECKING

from quire.protocol.process.child import Command, Report

if TYPE_CHECKING:
    from sim_world import World

PIPE_S = 0.001
HEARTBEAT_S = 3.0


class SimProcess:
    """Implements ``policy.Process``.

    Attributes:
        hung: its main loop does nothing any more, its signs of life go on.
        frozen: nothing of it runs any more.
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
        self.world.events.after(PIPE_S, lambda: self.hear(command) if self.alive else None)

    def hear(self, command: Command) -> None:
        raise NotImplementedError

    def die(self, how: str) -> None:
        """By itself, or by a signal: the supervisor notices when its memory is free."""
        if not self.alive:
            return
        self.vanish()
        world = self.world
        world.events.after(2 * PIPE_S + world.faults.memory_held(), lambda: world.ended(self, how))

    def vanish(self) -> None:
        """It was killed by whoever watches it, who need not be told."""
        self.alive = False
