"""The real scheduler on a virtual clock."""
