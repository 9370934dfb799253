"""Startup of a worker: from a configuration to a ready model runner."""
