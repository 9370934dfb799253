"""A limit on the connections to a bound ZeroMQ socket that other machines can reach.

libzmq accepts every connection, before a peer has shown a key. When the process has no descriptor left, libzmq's
listener uses a whole core, and the process can open no other file or socket.
"""

import socket
import threading
import time
from typing import Any
from uuid import uuid4

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.protocol.process.log import event_logger

log = event_logger("wire")

MAX_CONNECTIONS = 128
HANDSHAKE_MS = 5000
"""Time for a handshake, after which libzmq closes the connection."""
LOG_INTERVAL_S = 60.0
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class ConnectionLimit:
    """Closes excess connections to a socket, in a thread of its own."""

    def __init__(self, bound: "zmq.Socket[Any]", endpoint: str, limit: int = MAX_CONNECTIONS) -> None:
        """
        Args:
            bound: the socket, which is bound to ``endpoint`` after this.
            limit: open connections, with and without a key. Further ones are closed when they are accepted.
        """
        bound.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # Not `id(bound)`: a socket that was closed just before may have had it, and libzmq frees an address late.
        address = f"inproc://connections-{uuid4()}"
        bound.monitor(address, _EVENTS)
        events = bound.context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 0)  # otherwise libzmq would wait for the thread with a lock held
        events.connect(address)
        port = int(endpoint.rpartition(":")[2])
        self._bound = bound
        self._thread = threading.Thread(
            target=_close_excess, args=(events, port, limit), name="connections", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread. Call before the socket is closed."""
        self._bound.disable_monitor()
        self._thread.join()


def _close_excess(events: "zmq.Socket[Any]", port: int, limit: int) -> None:
    accepted: set[int] = set()
    logged = -LOG_INTERVAL_S
    with events:
        while True:
            message = recv_monitor_message(events)
            descriptor = int(message["value"])
            if message["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            if message["event"] == zmq.EVENT_DISCONNECTED:
                accepted.discard(descriptor)
            elif len(accepted) < limit:
                accepted.add(descriptor)
            else:
                close_connection(descriptor, port)
                if time.monotonic() >= logged + LOG_INTERVAL_S:
                    logged = time.monotonic()
                    log.warning("too many connections; further ones are closed", port=port, limit=limit)


def close_connection(descriptor: int, port: int) -> None:
    """Shut an accepted connection down; libzmq then closes it. It opens no descriptor, of which none may be left."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return  # closed already, and perhaps another file now
    try:
        if connection.family == socket.AF_INET and connection.getsockname()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        connection.detach()
