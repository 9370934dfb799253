"""A worker whose status pipe stays open after its death: a process that it has forked holds the pipe until it is killed
or the supervisor exits.

python -P -m pipe_holder --directory D --status-fd N --lifeline-fd N [--quiet]
"""

import os
import select
import signal
from pathlib import Path

from quire.protocol.process.child import Child, Report, child_parser


def holder_file(directory: Path, pid: int) -> Path:
    """File in which the worker ``pid`` writes the pid of the process that holds its pipe."""
    return directory / f"holder-{pid}"


def main() -> None:
    parser = child_parser(None)
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    holder = os.fork()
    if not holder:
        hang_up = select.poll()
        hang_up.register(args.lifeline_fd, 0)
        hang_up.poll()
        os._exit(0)
    holder_file(args.directory, os.getpid()).write_text(str(holder))
    child = Child(args.status_fd, args.lifeline_fd)
    child.report(Report("started"))
    while not any(command.kind == "stop" for command in child.take_commands()):
        child.wait()
    os.kill(holder, signal.SIGKILL)


if __name__ == "__main__":
    main()
