"""Start the router process with ``python -P -m quire.router_proc``. Only the fleet runs it."""

import msgspec

from quire.protocol.errors import ConfigError
from quire.protocol.process.child import Report, child_parser, init_child
from quire.protocol.routing import RoutingConfig
from quire.protocol.wire.zmq_channel import check_socket_directory
from quire.router_proc.loop import RouterLoop
from quire.router_proc.sockets import RouterSockets
from quire.version import __version__


def main() -> None:
    parser = child_parser(__doc__)
    parser.add_argument("--incarnation", type=int, required=True, help="incarnation of the router, from 1")
    args = parser.parse_args()
    child = init_child(args.status_fd, args.lifeline_fd, args.directory)
    try:
        check_socket_directory(args.directory)
        config = msgspec.json.decode((args.directory / "router").read_bytes(), type=RoutingConfig)
        if config.version != __version__:
            raise ConfigError(f"the router is of version {__version__}, but the server of {config.version or 'none'}")
        sockets = RouterSockets(args.directory, args.incarnation)
        loop = RouterLoop(config, sockets, child, args.directory, args.incarnation)
        child.report(Report("started"))
        child.report(Report("ready"))
        loop.run()
        sockets.close()
    except Exception as error:
        child.fail(error)


if __name__ == "__main__":
    main()
