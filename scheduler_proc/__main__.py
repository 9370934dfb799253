"""Start the scheduler process: ``python -P -m quire.scheduler_proc``, by the supervisor only."""

import signal

import msgspec
import zmq

from quire.protocol.channel import Link
from quire.protocol.child import Report, child_parser, enter_child, on_sigterm
from quire.protocol.config import FIRST_EPOCH, EngineConfig
from quire.protocol.messages import FrontEndToScheduler, WorkerToScheduler
from quire.protocol.zmq_channel import (
    ZmqChannel,
    ZmqHub,
    check_socket_directory,
    frontend_address,
    worker_address,
)
from quire.scheduler_proc.loop import SchedulerLoop


def main() -> None:
    parser = child_parser(__doc__)
    args = parser.parse_args()
    child = enter_child(args.status_fd, args.lifeline_fd, args.directory)
    try:
        check_socket_directory(args.directory)
        config = msgspec.msgpack.decode((args.directory / "config").read_bytes(), type=EngineConfig)
        context = zmq.Context()
        hub = ZmqHub(context, frontend_address(args.directory), FrontEndToScheduler)
        workers = [
            ZmqChannel(
                context,
                zmq.PAIR,
                worker_address(args.directory, FIRST_EPOCH, rank),
                Link(WorkerToScheduler, FIRST_EPOCH),
                bind=True,
            )
            for rank in range(config.tensor_parallel_size)
        ]
        loop = SchedulerLoop(config, hub, workers, child)
        on_sigterm(loop.stop)
        signal.signal(signal.SIGUSR2, lambda signum, frame: loop.dump())
        child.report(Report("started"))

        loop.run()
        for worker in workers:
            worker.close()
        hub.close()
        context.term()
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
