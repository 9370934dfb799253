"""Settings: flags, defaults, ranges, and their conversion to the engine configuration."""
