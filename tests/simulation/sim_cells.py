"""Which kinds of cache met which events, and with which settings: what a number of seeds has reached."""

from itertools import product

from quire.protocol.config import EngineConfig
from quire.protocol.model.kv_layout import KVLayout

KINDS = ("states", "latent_attention", "chunked_local", "sliding_window")
CACHING = ("cache", "no cache")
CHUNKS = ("chunks", "long chunks", "whole prompts")
EVENTS = ("preemption", "fork", "kill")
DRAFTS = ("no drafts", "drafts")
CELLS = frozenset(", ".join(cell) for cell in product(KINDS, CACHING, CHUNKS, EVENTS, DRAFTS))

SHORT_CHUNK = 16
"""Tokens, of which a longest prompt has three chunks."""


def cells_of(config: EngineConfig, layout: KVLayout, event: str) -> set[str]:
    """Return the cells of an event: one for each kind of cache that the model keeps.

    ``event``: requests that run are preempted, forked, or lose the workers.
    """
    most = min(config.long_prefill_token_threshold or config.max_num_batched_tokens, config.max_num_batched_tokens)
    chunks = CHUNKS[(most > SHORT_CHUNK) + (most >= config.max_model_len)]
    rest = (CACHING[not config.enable_prefix_caching], chunks, event, DRAFTS[config.num_speculative_tokens > 0])
    kinds = {group.kind for group in layout.groups} | ({"states"} if layout.states else set())
    return {", ".join((kind, *rest)) for kind in kinds if kind in KINDS}
