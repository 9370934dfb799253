"""The process of an engine of a fleet: ``python -P -m quire.launch.fleet``. Only the fleet starts it.

It supervises the engine's scheduler and workers, and reports when they are ready and which scheduler runs.
"""

from pathlib import Path

import msgspec

from quire.launch.nodes.remote_workers import NodeWorkers
from quire.launch.supervision.supervisor import REAL_WORKER, Supervisor, WorkerModule
from quire.protocol.config import EngineConfig
from quire.protocol.process.child import Child, Report, child_parser, init_child
from quire.protocol.process.log import LogOptions
from quire.protocol.wire.zmq_channel import check_socket_directory

TICK_S = 1.0


def run(directory: Path, child: Child, worker: WorkerModule, *, standby: bool) -> None:
    """Run the engine with the file ``config`` in its directory until the fleet sends ``stop``.

    Raises:
        ConfigError, EngineError: the engine cannot continue, with the reason.
    """

    def report_incarnation(incarnation: int) -> None:
        child.report(Report("incarnation", incarnation=incarnation))

    config = msgspec.msgpack.decode((directory / "config").read_bytes(), type=EngineConfig)
    with Supervisor(
        config,
        worker=worker,
        standby=standby,
        on_new_scheduler=report_incarnation,
        directory=directory,
        remote=NodeWorkers(config, LogOptions.of(None, None)) if config.uses_nodes else None,
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
                child.report(supervisor.policy.ready_report)
            was_ready = supervisor.is_ready


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--standby", action="store_true", help="keep a standby worker per rank")
    parser.add_argument("--worker", default=REAL_WORKER.module, help="module of a worker")
    parser.add_argument("--worker-argument", action="append", default=[], help="argument of that module")
    args = parser.parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory)
    try:
        check_socket_directory(args.directory)
        child.report(Report("started"))
        worker = WorkerModule(args.worker, tuple(args.worker_argument))
        run(args.directory, child, worker, standby=args.standby)
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
