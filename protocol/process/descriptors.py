"""Limits on file descriptors of a serving process, and on client connections."""

import resource

# Descriptors for other uses: own sockets, pipes and files, and connections that are being refused.
RESERVED_DESCRIPTORS = 64
MOST_CONNECTIONS = 16_384


def raise_descriptor_limit() -> None:
    """Raise the descriptor limit of this process and its children to the hard limit.

    The usual soft limit of 1024 exists for programs that call ``select``, which Quire does not use.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptors_for_clients() -> int:
    """Return how many client connections this process may hold at once without running out of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(soft - RESERVED_DESCRIPTORS, soft // 4))
