"""Entry point of a worker process (``python -P -m quire.worker_proc``), started only by the supervisor.

The process imports everything first, which is slow, and then waits as a standby until the supervisor assigns it to a
worker group.
"""

import logging
import os
import signal
import sys
from functools import partial

from quire.protocol.process.child import Report, child_parser, init_child


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--quiet", action="store_true", help="log errors only and show no progress bar")
    args = parser.parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory, death_signal=signal.SIGKILL)
    try:
        import zmq

        from quire.protocol.wire.channel import Link
        from quire.protocol.wire.curve_keys import CurveEnd
        from quire.protocol.wire.worker_handshake import WorkerCommands
        from quire.protocol.wire.worker_messages import SchedulerToWorker
        from quire.protocol.wire.zmq_channel import ZmqChannel, check_socket_directory, worker_address
        from quire.worker_proc.loop import WorkerLoop
        from quire.worker_proc.parallel.join import join_group

        check_socket_directory(args.directory)
        child.report(Report("started"))

        commands = WorkerCommands(child)
        loop = WorkerLoop(commands, os.getpid(), progress=not args.quiet and sys.stderr.isatty())
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        while (command := commands.take()) is not None:
            worker_epoch, rank, remote = command.worker_epoch, command.rank, command.link
            if args.quiet or rank > 0:  # rank 0 logs for the others, except errors
                logging.getLogger("quire").setLevel(logging.ERROR)

            place = args.directory / f"ranks-{worker_epoch}"
            join = partial(join_group, rank=rank, path=place, link=remote)
            numbers = Link(SchedulerToWorker, worker_epoch)
            if remote is None:
                address = worker_address(args.directory, worker_epoch, rank)
                channel = ZmqChannel(context, zmq.PAIR, address, numbers, bind=False)
            else:
                keys = CurveEnd(remote.public_key, remote.secret_key, remote.scheduler_key)
                channel = ZmqChannel(context, zmq.PAIR, remote.address, numbers, bind=False, secure=keys.connect_with)
            loop.serve(channel, rank, join, remote.address if remote is not None else "")
            channel.close()
        loop.close()
        context.term()
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
