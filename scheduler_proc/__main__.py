"""Start the scheduler process with ``python -P -m quire.scheduler_proc``. Only the supervisor runs it."""

import signal

import msgspec

from quire.protocol.config import EngineConfig
from quire.protocol.process.child import Report, child_parser, init_child
from quire.protocol.wire.zmq_channel import check_socket_directory
from quire.scheduler_proc.process.loop import SchedulerLoop
from quire.scheduler_proc.process.sockets import Sockets


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--incarnation", type=int, required=True, help="scheduler incarnation, from 1")
    parser.add_argument("--worker-epoch", type=int, required=True, help="worker epoch of the group that is starting")
    args = parser.parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory)
    try:
        check_socket_directory(args.directory)
        config = msgspec.msgpack.decode((args.directory / "config").read_bytes(), type=EngineConfig)
        nodes = config.uses_nodes, config.weights_path
        sockets = Sockets(args.directory, args.incarnation, config.tensor_parallel_size, *nodes)
        loop = SchedulerLoop(config, sockets, child, args.worker_epoch, directory=args.directory)
        signal.signal(signal.SIGUSR2, lambda signum, frame: loop.dump())
        child.report(Report("started"))
        loop.run()
        sockets.close()
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
