"""The process of an engine of a fleet: ``python -P -m quire.launch.fleet``. Only the fleet starts it.

It supervises the engine's scheduler and workers, and reports when they are ready and which scheduler runs.
"""

from pathlib import Path

from quire.launch.fleet.engine_start import EngineStart, read_start
from quire.launch.nodes.remote_workers import NodeWorkers
from quire.launch.supervision.supervisor import Supervisor
from quire.protocol.process.child import Child, Report, child_parser, init_child
from quire.protocol.wire.zmq_channel import check_socket_directory

TICK_S = 1.0


def run(start: EngineStart, directory: Path, child: Child) -> None:
    """Run the engine until the fleet sends ``stop``.

    Raises:
        ConfigError, EngineError: the engine cannot continue, with the reason.
    """

    def report_incarnation(incarnation: int) -> None:
        child.report(Report("incarnation", incarnation=incarnation))

    with Supervisor(
        start.config,
        worker=start.worker,
        standby=start.standby,
        on_new_scheduler=report_incarnation,
        directory=directory,
        remote=NodeWorkers(start.config, start.log) if start.config.uses_nodes else None,
    ) as supervisor:
        supervisor.wake_on(child.fileno())
        supervisor.start_engine()
        child.watch_progress(lambda: None)
        was_ready = False
        while True:
            supervisor.watch(TICK_S)
            child.progress()
            for command in child.take_commands():
                match command.kind:
                    case "front_end_exited":
                        supervisor.front_end_exited(command.pid)
                    case "stop":
                        return
            if supervisor.is_ready and not was_ready:
                child.report(Report("ready", detail=supervisor.policy.ready_detail))
            was_ready = supervisor.is_ready


def main() -> None:
    args = child_parser(__doc__).parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory)
    try:
        check_socket_directory(args.directory)
        child.report(Report("started"))
        run(read_start(args.directory), args.directory, child)
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
