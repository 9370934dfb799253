"""The router's decisions. No I/O."""
