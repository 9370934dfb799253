"""Start one worker process: ``python -P -m quire.worker_proc``, by the supervisor only."""

import os
import signal
import sys

from quire.protocol.child import Report, child_parser, enter_child


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")
    args = parser.parse_args()
    child = enter_child(args.status_fd, args.lifeline_fd, args.directory)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        import zmq

        from quire.protocol.channel import Link
        from quire.protocol.config import EngineConfig
        from quire.protocol.messages import SchedulerToWorker
        from quire.protocol.zmq_channel import ZmqChannel, check_socket_directory, worker_address
        from quire.worker_proc.loop import WorkerLoop
        from quire.worker_proc.parallel.group import TensorParallel
        from quire.worker_proc.parallel.join import join_group
        from quire.worker_proc.setup import say_on_stderr

        check_socket_directory(args.directory)
        child.report(Report("started"))
        context = zmq.Context()
        link = Link(SchedulerToWorker, args.epoch)
        channel = ZmqChannel(context, zmq.PAIR, worker_address(args.directory, args.epoch, args.rank), link, bind=False)
        say = (lambda text: None) if args.quiet else say_on_stderr
        progress = not args.quiet and sys.stderr.isatty()

        def join(config: EngineConfig) -> TensorParallel:
            return join_group(config, args.rank, args.directory / f"ranks-{args.epoch}")

        WorkerLoop(channel, args.rank, os.getpid(), join, say, progress=progress).run()
        channel.close()
        context.term()
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
