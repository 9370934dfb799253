"""Workers on other machines: how they reach the scheduler and each other, and with which keys."""

from pathlib import Path

import msgspec


class WorkerLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker on a node gets with the command to join a group. All keys are 40 characters of Z85.

    Attributes:
        address: where the scheduler binds the socket of this rank and worker epoch: ``tcp://ADDRESS:PORT``.
        scheduler_key: the scheduler's public key.
        public_key, secret_key: the worker's own pair, made for this rank and epoch.
        rendezvous: ``tcp://ADDRESS:PORT`` of the store of rank 0's machine at which ranks on several machines meet;
            empty if all ranks are on one.
        own_address: address of this machine, by which ranks on other machines reach it.
    """

    address: str
    scheduler_key: str
    public_key: str
    secret_key: str
    rendezvous: str = ""
    own_address: str = ""


class NodeLinkKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's end of a link to a worker on a node.

    Attributes:
        address: as in WorkerLink; empty for a rank on this machine.
        public_key, secret_key: the scheduler's pair for this rank and epoch.
        worker_key: the only public key that may connect.
    """

    address: str
    public_key: str
    secret_key: str
    worker_key: str


def links_file(directory: Path, worker_epoch: int) -> Path:
    """Return the file with the NodeLinkKeys of each rank of an epoch, which the supervisor writes beforehand."""
    return directory / f"links-{worker_epoch}"


def read_links(directory: Path, worker_epoch: int) -> list[NodeLinkKeys]:
    """Return the links of all ranks of an epoch."""
    return msgspec.json.decode(links_file(directory, worker_epoch).read_bytes(), type=list[NodeLinkKeys])
