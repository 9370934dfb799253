"""The logits processors that need no plugin, each usable alone through ``LogitsProcessor``."""
