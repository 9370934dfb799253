"""Decoders. Attention metadata is an argument of a call, not global state."""
