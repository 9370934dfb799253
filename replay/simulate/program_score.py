"""Compares the programs that the scheduler found by prefixes with the conversations of the trace."""

from collections import Counter

from quire.replay.workload.workload import Call
from quire.scheduler_proc.features.programs.program_state import ProgramState


class ProgramScore:
    """Counts turns by whether their program is the right one. A sub-agent is a conversation of its own.

    The first turn of a program owns it. A first turn of a conversation is right if it owns its program; otherwise it is
    *merged* with another conversation. A later turn is right if a turn of its conversation owns the program; it is
    *split* from its conversation if it owns the program itself.
    """

    def __init__(self) -> None:
        self._owner_of: dict[ProgramState, tuple[str, str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._verdicts: Counter[tuple[bool, str]] = Counter()

    def add(self, call: Call, program: ProgramState | None) -> None:
        """Count a turn. ``program``: as found; None, for a prompt without a full block, counts as a new one."""
        if not call.conversation:
            return
        conversation = call.conversation, call.agent
        owner = None if program is None else self._owner_of.get(program)
        if conversation not in self._seen:
            verdict = "right" if owner is None else "merged"
        else:
            verdict = "split" if owner is None else "right" if owner == conversation else "merged"
        self._seen.add(conversation)
        if program is not None:
            self._owner_of.setdefault(program, conversation)
        self._verdicts[bool(call.agent), verdict] += 1

    def figures(self) -> dict[str, int]:
        """Return the counts for the JSON; those of sub-agents apart."""
        found: dict[str, int] = {}
        for is_agent, prefix in ((False, ""), (True, "subagent_")):
            counts = {name: self._verdicts[is_agent, name] for name in ("right", "split", "merged")}
            found |= {f"{prefix}turns": sum(counts.values())} | {f"{prefix}{name}": n for name, n in counts.items()}
        return found
