"""What a simulation ends with that has found something."""


class Violation(AssertionError):
    """What must never be."""
