"""Engines that tests borrow: one per model and flags, kept for the session.

A start costs seconds of CPU time. Tests that kill a process, or that need a state of their own, start their own engine.
"""

import time
from pathlib import Path
from typing import Any

from engine_processes import SHARED, engine_processes

from quire import LLM

DEMO: dict[str, Any] = {
    "deterministic": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 70,
    "reasoning_start_str": "<t>",
    "reasoning_end_str": "</t>",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False},
    "logits_processors": ["only_one_token:Only"],
}
"""Flags of an engine with the demo model, for tests that need no others: with drafts, and with a plugin."""
TINY: dict[str, Any] = {
    "max_model_len": 128,
    "num_gpu_blocks_override": 40,
    "block_size": 8,
    "max_num_seqs": 16,
    "scheduling_policy": "priority",
    "max_num_queued_reqs": 2,
    "reserve_full_sequence": False,
    "watermark": 0.0,
}
"""The same for a tiny checkpoint: few blocks, so that requests are preempted, and a queue that they alone may fill."""

MOST_KEPT = 2
IDLE_S = 60


class LentEngines:
    """Owns the engines of a session. The one that was lent first ends when more than MOST_KEPT would be kept."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[LLM, set[int]]] = {}
        self._lent: list[LLM] = []

    def lend(self, model: Path | None = None, **flags: Any) -> LLM:
        """Return an engine without requests and cached prefixes; the test must not close it, or kill its processes."""
        key = f"{model} {sorted(flags.items())}"
        if key not in self._kept:
            while len(self._kept) >= MOST_KEPT:
                self._end(next(iter(self._kept)))
            before = {process.pid for process in engine_processes()}
            llm = LLM(model, **flags)
            pids = {process.pid for process in engine_processes()} - before
            SHARED.update(pids)
            self._kept[key] = llm, pids
        llm, _ = self._kept[key]
        self._lent.append(llm)
        return llm

    def check(self) -> None:
        """Wait until the engines that the last test borrowed have no requests, and check that they hold no blocks."""
        while self._lent:
            llm, deadline = self._lent.pop(), time.monotonic() + IDLE_S
            while (found := llm.statistics()).num_running or found.num_waiting:
                assert time.monotonic() < deadline, f"requests are left: {found}"
            assert llm.reset_prefix_cache()
            found = llm.statistics()
            assert found.num_free_blocks == found.num_usable_blocks, f"blocks are left: {found}"

    def close(self) -> None:
        for key in list(self._kept):
            self._end(key)

    def _end(self, key: str) -> None:
        llm, pids = self._kept.pop(key)
        llm.close()
        SHARED.difference_update(pids)
        left = {process.pid for process in engine_processes()} & pids
        assert not left, "processes outlive their engine"
