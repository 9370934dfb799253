"""From a configuration to a ready model runner."""
