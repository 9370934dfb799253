"""Validation of the items of an arrival. Each refusal names the value and its range."""

from collections.abc import Sequence

from quire.protocol.config import EngineConfig
from quire.protocol.wire.item_messages import InputItem
from quire.scheduler_proc.messages.arrivals import Refusal

PARAMS = {"image": "messages", "rows": "prompt_embeds"}
"""By kind of item, the field by which clients give it."""


def check_items(items: Sequence[InputItem], num_prompt_tokens: int, config: EngineConfig, pool_tokens: int) -> None:
    """Raise Refusal unless the engine can compute the rows of all items, and each has positions of its own.

    Args:
        num_prompt_tokens: positions that items may have.
        pool_tokens: most positions of a step of this request for which the KV pool has room.
    """
    end, kinds = 0, config.item_kinds
    for item in items:
        param = PARAMS.get(item.kind, "messages")
        if item.kind not in kinds:
            why = f"this engine takes {', '.join(kinds) or 'text only'} (got an item of the kind {item.kind[:20]!r})"
            raise Refusal("unsupported", param, why)
        if text := item.problem(end, num_prompt_tokens):
            raise Refusal("invalid_value", param, text)
        end = item.end
        _check_size(item, param, config, pool_tokens)


def _check_size(item: InputItem, param: str, config: EngineConfig, pool_tokens: int) -> None:
    what = "an image" if item.kind == "image" else "a prompt given as embeddings"
    if item.num_rows > config.encoder_cache_tokens:
        text = (
            f"{what} may have at most {config.encoder_cache_tokens} positions, the encoder cache of this engine (got "
            f"{item.num_rows}): make it smaller, or raise --encoder-cache-tokens"
        )
        raise Refusal("item_too_large", param, text)
    longest = longest_atom(item, config)
    if longest > (most := min(most_atom_tokens(config), pool_tokens)):
        text = (
            "all positions of an image of this model attend to each other, so that it must fit into one step, and into "
            f"the model's attention windows: at most {most} (got {longest}): make it smaller, or raise "
            "--max-num-batched-tokens or the size of the KV pool"
        )
        raise Refusal("item_too_large", param, text)


def longest_atom(item: InputItem, config: EngineConfig) -> int:
    """Return the positions of the longest part of an item that no chunk may divide; 0 without."""
    return max(count for _, count in item.ranges) if item.kind in config.whole_kinds else 0


def most_atom_tokens(config: EngineConfig) -> int:
    """Return the most positions of a part that no chunk may divide.

    A step always has those for a prefill that are left beside a token of each other request: with fewer, it could wait
    for as long as new requests arrive and decode. And a hit may end inside the part, whose other positions attend to
    all of it: layers with a window keep no more before the end of a hit.
    """
    windows = [window for window in config.model.windows if window]
    return min([config.step_tokens - (config.max_num_seqs - 1), *windows])
