"""Eviction by value: which cached contents are likely to be used again, learned from the requests so far."""
