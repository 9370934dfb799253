"""The service of tenants by all engines, so that each engine can count what the others gave."""

from collections import Counter
from collections.abc import Mapping

from quire.protocol.wire.front_end_messages import TenantService


class TenantBook:
    """Remembers the service that each engine reported last, and what each was not yet sent of the others'."""

    def __init__(self) -> None:
        self._seen: dict[int, Mapping[int, int]] = {}
        self._due: dict[int, Counter[int]] = {}

    def report(self, engine: int, service: Mapping[int, int]) -> None:
        """Note the service by an engine, in tokens by tenant since its start. It decreases when tokens were loaded from
        host memory or disk that count as computed since the admission.

        The first report of an engine is only remembered: an earlier router may have passed it on.
        """
        before = self._seen.get(engine)
        self._seen[engine] = service
        self._due.setdefault(engine, Counter())
        if before is None:
            return
        added = {tenant: tokens - before.get(tenant, 0) for tenant, tokens in service.items()}
        for other in self._due:
            if other != engine:
                self._due[other].update(added)

    def take(self, engine: int) -> TenantService | None:
        """Return the service by other engines since the last call, if there is any, for one that has reported."""
        due, self._due[engine] = self._due[engine], Counter()
        served = sorted((tenant, tokens) for tenant, tokens in due.items() if tokens)
        return TenantService(served) if served else None

    def forget(self, engine: int) -> None:
        """Forget an engine that has ended; its replacement counts from 0."""
        self._seen.pop(engine, None)
        self._due.pop(engine, None)
