"""The limit on connections to a socket; tests/abuse/test_curve.py has those with strangers."""

import zmq

from quire.protocol.wire.connection_limit import ConnectionLimit


def test_a_socket_may_be_limited_right_after_another_was_closed() -> None:
    """The sockets often have the same ``id``."""
    with zmq.Context() as context:
        for _ in range(100):
            with context.socket(zmq.PAIR) as bound:
                ConnectionLimit(bound, "tcp://127.0.0.1:1").close()
