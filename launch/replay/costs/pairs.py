"""How many (query, key) pairs attention scores."""


def prefill_pairs(chunk: int, before: int, window: int = 0) -> float:
    """Of a causal prefill of ``chunk`` tokens after ``before`` others; each sees ``window`` at most, 0: all."""
    if not window or before + chunk <= window:
        return chunk * before + chunk * (chunk + 1) / 2
    growing = min(max(window - before, 0), chunk)  # these see everything before them
    return growing * before + growing * (growing + 1) / 2 + (chunk - growing) * window


def decode_pairs(num_decodes: int, context: float, window: int = 0) -> float:
    """Of decodes that attend to ``context`` tokens in all; each is taken to have the mean."""
    if not num_decodes:
        return 0.0
    return min(context, num_decodes * window) if window else context
