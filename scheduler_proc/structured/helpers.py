"""The open helpers: one shared by most grammars, and private ones for those that are expensive."""

import select
from collections.abc import Collection

from quire.scheduler_proc.structured.cache import CompilingGrammar
from quire.scheduler_proc.structured.helper_process import HelperMaker, MaskHelper
from quire.scheduler_proc.structured.limits import (
    MAX_PRIVATE_BYTES,
    MAX_PRIVATE_HELPERS,
    MAX_PRIVATE_HELPERS_OF_TENANT,
    MAX_SHARED_BYTES,
    RETRY_SECONDS,
    STALLED_SECONDS,
    STARTING_SECONDS,
)
from quire.scheduler_proc.structured.mask_messages import Forget, FromHelper, Prepare, Prepared, Started, ToHelper


class HelperState:
    """A helper, and what it was asked.

    Attributes:
        grammars: grammars that it compiles or has compiled, by number.
        preparing: those of them that it has not answered.
        heard: when its oldest outstanding work began, or it answered last.
    """

    def __init__(self, helper: MaskHelper, tenant: int, now: float, *, is_private: bool) -> None:
        self.end = helper
        self.tenant = tenant
        self.is_private = is_private
        self.grammars: dict[int, CompilingGrammar] = {}
        self.preparing: set[int] = set()
        self.started_at: float | None = None
        self.heard = now
        self.waits_to_send = False
        self._places = list(range(len(helper.masks)))
        self._asked: dict[int, dict[int, list[int]]] = {}
        """Rows of the shared memory by ask and output."""

    @property
    def is_busy(self) -> bool:
        return bool(self._asked or self.preparing)

    def send(self, message: ToHelper) -> None:
        self.end.send(message)

    def prepare(self, grammar: CompilingGrammar) -> None:
        """Have it compile a grammar, unless it has done so."""
        if grammar.number not in self.grammars:
            self.grammars[grammar.number] = grammar
            self.preparing.add(grammar.number)
            self.send(Prepare(grammar.number, grammar.wanted))

    def take_places(self, ask: int, output: int, count: int) -> list[int] | None:
        """Take rows of the shared memory for the masks of an output, or None if they are in use."""
        if len(self._places) < count:
            return None
        taken = self._places[-count:]
        del self._places[-count:]
        self._asked.setdefault(ask, {})[output] = taken
        return taken

    def give_places(self, ask: int, outputs: list[int]) -> list[list[int]]:
        """Free the rows of outputs that were answered, and return them."""
        asked = self._asked[ask]
        given = [asked.pop(output) for output in outputs]
        if not asked:
            del self._asked[ask]
        for places in given:
            self._places += places
        return given

    def receive(self, now: float) -> list[FromHelper]:
        if not self.is_busy:
            self.heard = now
        messages = self.end.receive()
        for message in messages:
            self.heard = now
            match message:
                case Started():
                    self.started_at = now
                case Prepared():
                    self.preparing.discard(message.grammar)
                case _:
                    pass
        return messages

    def is_stalled(self, now: float) -> bool:
        """Whether it has not answered for so long that it must have been stopped."""
        limit = STARTING_SECONDS if self.started_at is None else STALLED_SECONDS
        return self.is_busy and now - self.heard > limit * (1 + 4 * self.is_private)


class MaskHelpers:
    """Owns the helpers, and the file descriptor that is readable when one has answered.

    When the shared helper has grown too much, later outputs get a new one; the old one is closed when the last of its
    outputs has ended, or when the new one has grown as well. Ending a helper is what returns its memory.
    """

    def __init__(self, maker: HelperMaker) -> None:
        self._maker = maker
        self._shared: HelperState | None = None
        self._old: HelperState | None = None
        self._private: dict[int, HelperState] = {}
        self._poller = select.epoll()
        self._retry_at = 0.0
        self._to_end: list[HelperState] = []

    def fileno(self) -> int:
        return self._poller.fileno()

    def watch(self, descriptor: int) -> None:
        """Make ``fileno`` readable with another descriptor too; negative ones are ignored."""
        if descriptor >= 0:
            self._poller.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        for helper in self._all():
            helper.end.close()
        self._maker.close()
        self._poller.close()

    @property
    def has_temporary(self) -> bool:
        """Whether there are helpers that ``close_unused`` may close."""
        return bool(self._private or self._old)

    def has_room(self, grammar: CompilingGrammar, tenant: int) -> bool:
        """Whether a grammar has, or can have, a helper of its own."""
        if grammar.number in self._private:
            return True
        return len(self._private) < MAX_PRIVATE_HELPERS and self.num_private(tenant) < MAX_PRIVATE_HELPERS_OF_TENANT

    def num_private(self, tenant: int) -> int:
        """Return the number of private helpers of a tenant."""
        return sum(helper.tenant == tenant for helper in self._private.values())

    def helper_for(self, grammar: CompilingGrammar, tenant: int, now: float, *, private: bool) -> HelperState | None:
        """Return the helper for an output of a grammar, opening it if needed; None if it cannot be opened now."""
        helper = self._private.get(grammar.number) if private else self._shared
        if helper is not None or now < self._retry_at:
            return helper
        try:
            helper = HelperState(self._maker.open(private=private), tenant, now, is_private=private)
        except OSError:
            self._retry_at = now + RETRY_SECONDS
            return None
        if private:
            self._private[grammar.number] = helper
        else:
            self._shared = helper
        self.watch(helper.end.fileno())
        return helper

    def forget_grammar(self, number: int) -> None:
        """Drop a compiled grammar that the cache has dropped; outputs that run keep it."""
        shared = self._shared
        if shared is not None and number in shared.grammars and number not in shared.preparing:
            del shared.grammars[number]
            shared.send(Forget(grammars=[number]))

    def receive(self, now: float) -> list[tuple[HelperState, FromHelper]]:
        """Return the messages of all helpers, without waiting."""
        received: list[tuple[HelperState, FromHelper]] = []
        for helper in self._all():
            received += [(helper, message) for message in helper.receive(now)]
            if helper.end.has_unsent != helper.waits_to_send and not helper.end.is_dead:
                helper.waits_to_send = helper.end.has_unsent
                out = select.EPOLLOUT if helper.waits_to_send else 0
                self._poller.modify(helper.end.fileno(), select.EPOLLIN | out)
        return received

    def take_dead(self, now: float) -> list[HelperState]:
        """Close and return the helpers that died, do not answer, or hold too much memory."""
        ended, self._to_end = self._to_end, []
        failed = [helper for helper in self._all() if helper.end.is_dead or helper.is_stalled(now)]
        dead = ended + [helper for helper in failed if helper not in ended]
        for helper in dead:
            if helper.started_at is None:
                self._retry_at = now + RETRY_SECONDS
            self._remove(helper)
        return dead

    def has_outgrown(self, helper: HelperState, num_bytes: int) -> bool:
        """Return whether a private helper holds too much memory. A shared helper that does is replaced."""
        if helper.is_private:
            return num_bytes > MAX_PRIVATE_BYTES
        if helper is self._shared and num_bytes > MAX_SHARED_BYTES:
            if self._old is not None:
                self._to_end.append(self._old)
            self._old, self._shared = helper, None
        elif helper is self._old and num_bytes > 2 * MAX_SHARED_BYTES:
            self._to_end.append(helper)
        return False

    def close_unused(self, used: Collection[HelperState | None], grammars: Collection[int]) -> None:
        """Close private helpers of grammars that are not among ``grammars``, and the old shared one if not ``used``."""
        for number, helper in list(self._private.items()):
            if number not in grammars and helper not in used and not helper.preparing:
                self._remove(helper)
        if self._old is not None and self._old not in used and self._old not in self._to_end:
            self._remove(self._old)

    def _all(self) -> list[HelperState]:
        shared = [helper for helper in (self._shared, self._old) if helper is not None]
        return [*shared, *self._private.values()]

    def _remove(self, helper: HelperState) -> None:
        helper.end.close()
        if helper is self._shared:
            self._shared = None
        elif helper is self._old:
            self._old = None
        else:
            self._private = {number: other for number, other in self._private.items() if other is not helper}
