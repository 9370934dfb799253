"""Sessions in a simulation: the real store of a front end, and pieces whose answers are those of fresh requests."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from sim_answers import expected_answer
from sim_scenario import MAX_MODEL_LEN, Scenario, SimRequest

from quire.frontend.sessions.open_session import Piece
from quire.frontend.sessions.session_store import SessionStore
from quire.protocol.errors import InvalidRequest
from quire.protocol.wire.front_end_messages import EndReason

if TYPE_CHECKING:
    from sim_front import SimClient
    from sim_world import World

PIECES_S = (0.05, 0.5, 4.0)
"""Mean times between two pieces; an answer may take longer, and then the next piece waits."""


def with_sessions(scenario: Scenario) -> Scenario:
    """Return the scenario with further requests: the pieces of two to five sessions, if the model generates."""
    if scenario.encoder:
        return scenario
    rng = random.Random(f"sessions {scenario.seed}")
    last = max(each.at for each in (*scenario.requests, *scenario.faults))
    pieces: list[SimRequest] = []
    for number in range(rng.randrange(2, 6)):
        at, front, salt = rng.uniform(0.0, last), rng.randrange(6), rng.choice(("", "", "salt"))
        pause = rng.choice(PIECES_S)
        for index in range(rng.randrange(3, 8)):
            even = rng.random() < 0.1
            piece = SimRequest(
                at=round(at, 3),
                name=f"s{number}.{index}",
                front=front,
                prefix=(rng.randrange(3), 8 if not index and rng.random() < 0.5 else 0),
                own=(rng.randrange(1000), rng.randrange(0 if index else 1, 4)),
                max_tokens=rng.choice((1, 2, 4, rng.randrange(1, 9))),
                ignore_eos=rng.random() < 0.6 and not even,
                priority=rng.choice((0, 0, 1, 5, -3)),
                salt=salt,
                then=rng.choice((("", 0),) * 6 + (("abort", 1), ("stop", rng.randrange(4)), ("leave_at", 3))),
                even=even,
                logprobs=rng.choice((None, None, 0, 2)),
                session=f"s{number}",
            )
            pieces.append(piece)
            at += rng.expovariate(1 / pause)
    requests = sorted((*scenario.requests, *pieces), key=lambda each: each.at)
    return replace(scenario, requests=tuple(requests))


class SimSessions:
    """The sessions of one front end."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._store = SessionStore(now=world.events)
        self._ids: dict[str, str] = {}
        self._expected: dict[str, list[int]] = {}
        """The tokens of each session as fresh requests give them."""
        self._running: dict[str, tuple[SimRequest, Piece]] = {}
        self._due: dict[str, list[SimRequest]] = {}
        """The pieces that wait until their session is idle."""

    def begin(self, request: SimRequest) -> SimRequest | None:
        """Return the request of a piece, with the tokens so far; None if it must wait, or is refused."""
        name = request.session
        if name not in self._ids:
            self._ids[name] = self._store.open(request.tenant)
            self._expected[name] = []
        session_id, expected = self._ids[name], self._expected[name]
        session = self._store.get(request.tenant, session_id)
        own = request.own_tokens
        try:
            piece = Piece(
                session_id,
                session,
                own,
                MAX_MODEL_LEN,
                number=session.num_pieces,
                on_end=lambda grown: self._store.piece_ended(session_id, grown, close=False),
            )
            piece.__enter__()
        except InvalidRequest as error:
            if error.code == "session_busy":
                assert name in self._running, f"{request.name}: an idle session is busy"
                self._due.setdefault(name, []).append(request)
            else:
                num_tokens = len(expected) + len(own)
                assert not 1 <= num_tokens < MAX_MODEL_LEN, f"{request.name} was refused: {error}"
            return None
        assert session.token_ids.tolist() == expected, f"{request.name}: the session has other tokens"
        self._running[name] = request, piece
        return replace(request, so_far=tuple(expected))

    def end(self, client: "SimClient") -> None:
        """A client is over. If it has a piece, its session is idle then."""
        name = client.request.session
        if name not in self._running or self._running[name][0].name != client.request.name:
            return
        request, piece = self._running.pop(name)
        kept = client.tokens if client.ended in (EndReason.STOPPED, EndReason.LENGTH) else None
        if client.stopped_at is not None:
            kept = client.tokens[: client.stopped_at]
        if kept is not None:
            piece.add(kept, "stop")
            fresh = self._world.requests[request.name]
            answer, _ = expected_answer(self._world, fresh, [])
            self._expected[name] = [*fresh.prompt, *answer[: client.stopped_at]]
            self._world.num_pieces += 1
        piece.__exit__()

    def next_piece(self, name: str) -> SimRequest | None:
        """Remove and return the next piece that waits for a session, if that is idle."""
        waiting = self._due.get(name)
        return waiting.pop(0) if waiting and name not in self._running else None
