"""How a worker, real or simulated, introduces itself to the scheduler."""

from quire.protocol.channel import Channel
from quire.protocol.errors import EngineError
from quire.protocol.messages import PROTOCOL_VERSION, Configure, Hello, Refused, Welcome


def ask_configuration(channel: Channel, rank: int, pid: int) -> Configure:
    """Say hello, and wait for what to be. Raises EngineError when the scheduler does not want this worker."""
    channel.send(Hello(PROTOCOL_VERSION, "worker", rank, pid))
    while True:
        received = channel.receive(None)
        match received.message if received else None:
            case Welcome():
                continue
            case Configure() as configure:
                return configure
            case Refused(reason=reason):
                raise EngineError(f"the scheduler refused this worker: {reason}")
            case other:
                raise EngineError(f"unexpected {type(other).__name__} instead of Configure")
