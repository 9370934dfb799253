"""The record of one simulated or replayed run."""
