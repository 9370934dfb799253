"""Numbers of (query, key) pairs of attention."""


def prefill_pairs(chunk: int, before: int, window: int = 0) -> float:
    """Return the pairs of a causal prefill of ``chunk`` tokens after ``before`` others; ``window`` 0: no window."""
    if not window or before + chunk <= window:
        return chunk * before + chunk * (chunk + 1) / 2
    growing = min(max(window - before, 0), chunk)  # these attend to all tokens before them
    return growing * before + growing * (growing + 1) / 2 + (chunk - growing) * window


def decode_pairs(num_decodes: int, context: float, window: int = 0) -> float:
    """Return the pairs of decodes with ``context`` tokens in total; each is assumed to have the mean."""
    if not num_decodes:
        return 0.0
    return min(context, num_decodes * window) if window else context
