"""Signals that all processes of the engine treat alike."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals on which the supervisor stops the engine in order."""
IGNORED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Signals without a meaning for the engine, which would end a process by default. SIGUSR2 has one for the scheduler."""
