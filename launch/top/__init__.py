"""``quire top``: the figures of a running server."""
