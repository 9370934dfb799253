"""Cost models: the duration of a step on a machine that is not available."""
