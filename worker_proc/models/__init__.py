"""Decoders as plain torch modules. Attention metadata is an argument of ``forward``, not global state."""
