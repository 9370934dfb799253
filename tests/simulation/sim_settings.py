"""Settings of a simulated engine, drawn at random: tiny pools, odd sizes and any combination of switches."""

import random
from typing import Any

import msgspec
from kv_cases import LAYOUTS, layout_like
from sim_cells import CACHING, CHUNKS, KINDS

from quire.protocol.model.kv_layout import KVGroup, KVLayout, StateTensor
from quire.protocol.model.pooling_config import PoolingConfig
from quire.protocol.model.vision_config import VisionConfig

VOCAB_SIZE = 1000
EOS = list(range(0, VOCAB_SIZE, 40))
MAX_MODEL_LEN = 40
MAX_IMAGE = 5
"""Most positions of an image."""
STATES = [StateTensor("layers.2", "state", (1,), "float32")]


def random_layout(rng: random.Random) -> KVLayout:
    """Return one to three groups."""
    size = rng.choice((1, 2, 4))
    kinds = ["full_attention", "sliding_window"]
    groups = [KVGroup(rng.choice(kinds), size, [0], rng.randrange(1, 12))]
    for _ in range(rng.randrange(3)):
        kind, _, window = rng.choice(kinds), rng.choice((1, 1, 2, 3)), rng.randrange(1, 12)
        groups.append(KVGroup(kind, size, [0], window))
    # Without another random number: all groups of a layout with some windows have chunks instead.
    if groups[-1].window % 3 == 0:
        kinds_of = {"sliding_window": "chunked_local"}
        groups = [msgspec.structs.replace(group, kind=kinds_of.get(group.kind, group.kind)) for group in groups]
    rng.shuffle(groups)
    return KVLayout(groups, num_kv_heads=1, head_dim=4, dtype="float32")


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings with tiny pools, odd chunk sizes and any combination of switches."""
    layout = random_layout(rng) if rng.random() < 0.6 else None
    num_drafts = rng.choice((0, 0, 1, 3))
    asynchronous = rng.random() < 0.7
    max_num_seqs = rng.choice((1, 3, 8))
    least = max_num_seqs * (1 + num_drafts)
    chunked = rng.random() < 0.8
    num_blocks = rng.choice((6, 10, 14, 40, 60))
    return {
        "layout": layout,
        "num_blocks": num_blocks,
        "num_host_pages": (0, 6, 60)[(num_blocks + max_num_seqs) % 3],  # without another random number
        "block_size": rng.choice((1, 2, 4, 8)),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(least, rng.choice((8, 13, 64)) if chunked else MAX_MODEL_LEN),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.85,
        "long_prefill_token_threshold": rng.choice((0, 0, 3, 7)) if chunked else 0,
        "max_prefill_share": rng.choice((0.1, 0.5, 1.0)),
        "async_scheduling": asynchronous,
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "reserve_full_sequence": rng.random() < 0.1,
        "watermark": rng.choice((0.0, 0.0, 0.1)),
        "kv_pressure_high": (0.8, 1.0, 1.0)[(num_blocks + least) % 3],
        "kv_pressure_low": (0.5, 1.0, 1.0)[(num_blocks + least) % 3],
        "max_num_queued_reqs": rng.choice((0, 0, 4)),
        "num_speculative_tokens": num_drafts,
        "adaptive": rng.random() < 0.7,
        "enable_return_routed_experts": True,
        "eos": EOS,
    }


def adapter_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings with few slots for many adapters."""
    max_loras = rng.choice((1, 1, 2, 4))
    return {"enable_lora": True, "max_loras": max_loras, "max_cpu_loras": max_loras + rng.choice((1, 1, 3))}


def item_settings(rng: random.Random, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with images, and room for few of them."""
    vision = VisionConfig("TinyVision", 9, is_causal=rng.random() < 0.6, mrope_section=rng.choice(((), (1, 1))))
    least = settings["max_num_seqs"] - 1 + MAX_IMAGE  # an image in one step, beside a token of each other request
    return {
        "vision": vision,
        "encoder_cache_tokens": rng.choice((MAX_IMAGE, 8, 30)),
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": max(settings["max_num_batched_tokens"], least),
    }


def program_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings with a policy that needs programs."""
    return {"scheduling_policy": rng.choice(("program", "continuum")), "enable_prefix_caching": True}


def pooling_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings whose model generates, and pools in all ways."""
    pooling = PoolingConfig(
        tasks=["embed", "token_embed", "classify"],
        pooling=rng.choice(("last", "last", "mean", "cls")),
        size=6,
        labels=["yes", "no"],
    )
    return {"pooling": pooling}


def encoder_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings whose model keeps no KV, and only pools."""
    return pooling_settings(rng) | {
        "generates": False,
        "layout": KVLayout([], num_kv_heads=1, head_dim=4, dtype="float32"),
        "num_blocks": 2,
        "num_host_pages": 0,
        "enable_chunked_prefill": False,
        "long_prefill_token_threshold": 0,
        "max_num_batched_tokens": rng.choice((MAX_MODEL_LEN, 64)),
        "num_speculative_tokens": 0,
    }


def state_settings(rng: random.Random) -> dict[str, Any]:
    """Return settings of a model with recurrent states, and with few slots for them."""
    block_size = rng.choice((1, 2, 4))
    groups = [KVGroup("full_attention", block_size, [0])]
    groups += [KVGroup("sliding_window", block_size, [1], rng.randrange(1, 12))] * rng.randrange(2)
    layout = KVLayout(groups, 1, 4, "float32", states=STATES, state_chunk=rng.choice((4, 8)))
    return {"layout": layout, "block_size": block_size, "num_blocks": 80, "num_slots": rng.choice((2, 3, 5, 5, 12))}


def table_settings(rng: random.Random, number: int) -> dict[str, Any]:
    """Return settings that reach the cells of one kind of cache (``sim_cells.py``), by the number of their combination.

    Two long requests do not fit the pool together, so that some are preempted.
    """
    number, kind = divmod(number, len(KINDS))
    number, has_no_cache = divmod(number, len(CACHING))
    drafts, chunks = divmod(number, len(CHUNKS))
    size = rng.choice((2, 4))
    full, window = KVGroup("full_attention", size, [0]), rng.randrange(2, 12)
    groups = {
        "latent_attention": [KVGroup("latent_attention", size, [0])],
        "chunked_local": [KVGroup("chunked_local", size, [1], window), full],
        "sliding_window": [full, KVGroup("sliding_window", size, [1], window)],
    }.get(KINDS[kind])
    layout = KVLayout(groups or [full], 1, 4, "float32", states=[] if groups else STATES, state_chunk=4)
    return {
        "layout": layout,
        "block_size": size,
        "num_blocks": 3 + MAX_MODEL_LEN * 3 // (2 * size),
        "max_num_seqs": 4,
        "enable_prefix_caching": not has_no_cache,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "max_num_batched_tokens": (12, 24, 64)[chunks],
        "num_speculative_tokens": (0, 2)[drafts % 2],
        "reserve_full_sequence": False,
        **({} if groups else {"num_slots": rng.choice((5, 12))}),
        **({"cpu_offload_bytes": 0} if has_no_cache else {}),
    }


def layout_settings(rng: random.Random) -> dict[str, Any]:
    """Return the layout of one of LAYOUTS, and a pool that has room for a few requests."""
    block_size = rng.choice((1, 2, 4, 8))
    layout = layout_like(rng.choice(sorted(LAYOUTS)), rng.randrange(1, 30), block_size)
    blocks_of_a_request = len(layout.groups) * (MAX_MODEL_LEN // block_size + 1)
    return {"layout": layout, "num_blocks": 1 + rng.randrange(2, 6) * blocks_of_a_request}
