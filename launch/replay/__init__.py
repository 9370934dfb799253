"""Traces and workloads through the real scheduler: exactly as recorded, or as they would have run elsewhere."""
