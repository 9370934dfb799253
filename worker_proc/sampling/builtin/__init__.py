"""The built-in logits processors, each also usable alone through the ``LogitsProcessor`` interface."""
