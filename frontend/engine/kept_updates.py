"""The updates of one answer, kept so that another process can continue it after this one."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.frontend.engine.update import Update
from quire.protocol.wire.front_end_messages import AddRequest

Take = Callable[[], Update | None]


class KeptUpdates:
    """Those that earlier processes have kept, which are repeated first and one by one, and what keeps further ones.

    So text and events are made of the same pieces as before.
    """

    def __init__(self, earlier: Sequence[Update], keep: Callable[[Update], None]) -> None:
        self._earlier, self._keep = earlier, keep
        self._token_ids = [token for update in earlier for token in update.token_ids]

    def continued(self, request: AddRequest) -> AddRequest:
        """Return the request with the tokens of the earlier updates, after which the scheduler continues."""
        if not self._token_ids:
            return request
        return msgspec.structs.replace(request, output_token_ids=np.array(self._token_ids, np.int32))

    def reader(self, take: Take, on_update: Callable[[], None]) -> Take:
        """Return ``take`` of the continued sequence with the earlier updates before its own.

        ``on_update``: asks for the next one; the sequence itself has nothing to tell of these.
        """
        earlier, num_known = iter(self._earlier), len(self._token_ids)

        def read() -> Update | None:
            nonlocal num_known
            if (again := next(earlier, None)) is not None:
                asyncio.get_running_loop().call_soon(on_update)
                return msgspec.structs.replace(again, admitted=0.0)  # a time of an earlier process
            update = take()
            if update is None:
                return None
            if num_known:  # the first update has them all
                update.token_ids, num_known = update.token_ids[num_known:], 0
            if update.ended is None:
                if not update.token_ids:
                    return None
                self._keep(
                    Update(
                        update.token_ids,
                        update.logprobs,
                        num_output_tokens=update.num_output_tokens,
                        num_cached_tokens=update.num_cached_tokens,
                    )
                )
            return update

        return read
