"""How many file descriptors a serving process may have, and how many of them its clients."""

import resource

# What is no client's: our own sockets, pipes and files, and the connections of clients that are being refused.
RESERVED_DESCRIPTORS = 64
MOST_CONNECTIONS = 16_384


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many as the system's administrator allows.

    The usual soft limit of 1024 is there for programs that call ``select``; none of ours does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptors_for_clients() -> int:
    """How many connections this process may hold at once without running out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(soft - RESERVED_DESCRIPTORS, soft // 4))
