"""Replays of traces and workloads with the real scheduler: exactly as recorded, or with other settings."""
