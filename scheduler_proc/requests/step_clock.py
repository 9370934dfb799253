"""The newest steps: what the counters of all requests in steady decode follow from."""


class StepClock:
    """Numbers of the newest step that was sent, and of the newest that was answered."""

    __slots__ = ("acknowledged", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
