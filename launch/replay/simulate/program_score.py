"""Compares the programs that the scheduler found by prefixes with the conversations of the trace."""

from collections import Counter

from quire.launch.replay.workload.workload import Call
from quire.scheduler_proc.requests.request import Program


class ProgramScore:
    """Counts turns by whether their program is the right one. A sub-agent is a conversation of its own.

    A first turn is right if it begins a program; otherwise it is *merged* with another conversation. A later turn is
    right if its conversation has begun the program; it is *split* from its conversation if it begins another one.
    """

    def __init__(self) -> None:
        self._begun_by: dict[Program, tuple[str, str]] = {}
        self._seen: set[tuple[str, str]] = set()
        self._verdicts: Counter[tuple[bool, str]] = Counter()

    def add(self, call: Call, program: Program | None) -> None:
        """Count a turn. ``program``: the one that was found; None, for a prompt without a full block, is a new one."""
        if not call.conversation:
            return
        conversation = call.conversation, call.agent
        begun_by = None if program is None else self._begun_by.get(program)
        if conversation not in self._seen:
            verdict = "right" if begun_by is None else "merged"
        else:
            verdict = "split" if begun_by is None else "right" if begun_by == conversation else "merged"
        self._seen.add(conversation)
        if program is not None:
            self._begun_by.setdefault(program, conversation)
        self._verdicts[bool(call.agent), verdict] += 1

    def figures(self) -> dict[str, int]:
        """Return the counts for the JSON; those of sub-agents apart."""
        found: dict[str, int] = {}
        for is_agent, prefix in ((False, ""), (True, "subagent_")):
            counts = {name: self._verdicts[is_agent, name] for name in ("right", "split", "merged")}
            found |= {f"{prefix}turns": sum(counts.values())} | {f"{prefix}{name}": n for name, n in counts.items()}
        return found
