"""The updates of one answer, kept so that another process can continue it after this one."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.frontend.engine.update import Update
from quire.protocol.wire.front_end_messages import AddRequest

Take = Callable[[], Update | None]


@dataclass(frozen=True, slots=True)
class KeptUpdates:
    """Those that earlier processes have kept, which are repeated first and one by one, and what keeps further ones.

    So text and events are made of the same pieces as before.
    """

    earlier: Sequence[Update]
    keep: Callable[[Update], None]

    def continued(self, request: AddRequest) -> AddRequest:
        """Return the request with the tokens of the earlier updates, after which the scheduler continues."""
        tokens = [token for update in self.earlier for token in update.token_ids]
        return msgspec.structs.replace(request, output_token_ids=np.array(tokens, np.int32)) if tokens else request

    def reader(self, take: Take, on_update: Callable[[], None]) -> Take:
        """Return ``take`` of the continued sequence with the earlier updates before its own.

        ``on_update``: asks for the next one; the sequence itself has nothing to tell of these.
        """
        earlier, num_known = iter(self.earlier), sum(len(update.token_ids) for update in self.earlier)

        def read() -> Update | None:
            nonlocal num_known
            if (again := next(earlier, None)) is not None:
                asyncio.get_running_loop().call_soon(on_update)
                return again
            if (update := take()) is None:
                return None
            # The first update has them all.
            update.token_ids, num_known = update.token_ids[num_known:], 0
            if update.ended is not None:
                return update
            if not update.token_ids:
                return None
            num_output, num_cached = update.num_output_tokens, update.num_cached_tokens
            self.keep(
                Update(update.token_ids, update.logprobs, num_output_tokens=num_output, num_cached_tokens=num_cached)
            )
            return update

        return read
