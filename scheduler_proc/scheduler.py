"""The scheduler with all of its features."""

from collections.abc import Sequence
from typing import Any

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout
from quire.scheduler_proc.core.context import Core
from quire.scheduler_proc.core.feature import Feature
from quire.scheduler_proc.core.scheduler import BareScheduler
from quire.scheduler_proc.costs.costs import Costs, CostState
from quire.scheduler_proc.features.adapters.adapters import Adapters
from quire.scheduler_proc.features.beams.beams import Beams
from quire.scheduler_proc.features.drafts.drafting import check_drafts_fit
from quire.scheduler_proc.features.drafts.drafts import Drafts
from quire.scheduler_proc.features.forks import Forks
from quire.scheduler_proc.features.items.items import Items
from quire.scheduler_proc.features.pooling import Pooling
from quire.scheduler_proc.features.programs.programs import Programs
from quire.scheduler_proc.features.result_bytes import ResultBytes
from quire.scheduler_proc.features.routed_experts import RoutedExpertRows
from quire.scheduler_proc.features.states import States
from quire.scheduler_proc.features.suspects import Suspects
from quire.scheduler_proc.features.tenants import Tenants
from quire.scheduler_proc.features.transfers import Transfers
from quire.scheduler_proc.messages.results import StepTooLarge, WorkerFault

__all__ = ["Scheduler", "StepTooLarge", "WorkerFault"]


class Scheduler(BareScheduler):
    """The Scheduler that serves. Each feature is an attribute, by its name."""

    adapters: Adapters
    beams: Beams
    drafts: Drafts
    forks: Forks
    items: Items
    pooling: Pooling
    programs: Programs
    result_bytes: ResultBytes
    routed_experts: RoutedExpertRows
    states: States
    suspects: Suspects
    tenants: Tenants
    transfers: Transfers

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        num_blocks: int,
        *,
        costs: CostState | None = None,
        **parts: Any,
    ) -> None:
        """``costs``: what earlier engines have learned; ``parts``: as of ``BareScheduler``."""
        check_drafts_fit(config)  # first: the number comes from the header of a trace, and sizes lists
        self._costs = Costs(costs)
        super().__init__(config, layout, num_blocks, **parts)

    def make_features(self, core: Core) -> Sequence[Feature]:
        """Return the features. Their order, where it matters, hook by hook:

        * ``prepare``: programs, forks and routed experts may refuse a request, so they come before adapters, which
          keep what they have found. Pooling changes what routed experts and all others read, so it is first.
        * ``arrived``: programs note decisions before the others hold the request.
        * ``begin_plan``: beams are suspended before a suspect preempts all others: they have no blocks to give up.
        * ``after_running``: beams are forked from their leader before it is suspended, because it holds the blocks.
        * ``admitted``: programs end a pin before transfers look for free blocks.
        * ``ending``, in reverse: beams end before their leader's children would return to the queue; a load is given
          up before programs, which may schedule others, forget the request.
        * ``new_epoch``, in reverse: transfers return requests to the queue before adapters look whether any waits;
          suspects end last, when nothing holds them for the old workers.
        * ``spare`` only has programs, and tenants choose among those that are left: contexts that are kept between
          turns count more than an even number of blocks.
        """
        forks = Forks(core)
        return (
            Pooling(core),
            Programs(core, self._costs),
            forks,
            Beams(core, forks),
            RoutedExpertRows(core),
            ResultBytes(core),
            Suspects(core),
            Adapters(core),
            Transfers(core, self._costs),
            Items(core),
            States(core),
            Tenants(core),
            Drafts(core),
        )
