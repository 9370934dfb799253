"""The error that ends a simulation which found a violated invariant."""


class Violation(AssertionError):
    """An invariant does not hold."""
