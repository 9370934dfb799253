"""Step clock: the two step numbers from which the counters of requests in steady decode are computed."""


class StepClock:
    """Numbers of the newest step sent and of the newest step answered."""

    __slots__ = ("acknowledged", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.acknowledged = 0
