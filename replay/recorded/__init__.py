"""Traces that Quire recorded: reading, exact replay, differences."""
