"""Decoders as plain torch modules; attention metadata is passed to them, never found."""
