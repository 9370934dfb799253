"""Capabilities of the scheduler, each behind ``core/feature.py``."""
